"""Evaluate a run on 100 episodes and show the result in a web page: numbers, a histogram, a video, the run's report.

    python examples/evaluation_page.py                 # trains Pendulum for 20 seconds first
    python examples/evaluation_page.py runs/x          # a run that exists

The page is one file that needs no network. Needs the extras report and video.
"""

import base64
import sys
import webbrowser
from pathlib import Path

import pql

PAGE = """<!doctype html><meta charset="utf-8"><title>{run}</title>
<style>body {{font: 16px sans-serif; max-width: 48em; margin: auto}} rect {{fill: #47a}} video {{width: 100%}}</style>
<h1>{run}</h1><p>{episodes} episodes: mean return {mean:,.1f}, median {median:,.1f}, from {low:,.1f} to {high:,.1f}</p>
<svg viewBox="0 0 100 40">{bars}</svg>
<video controls loop src="data:video/mp4;base64,{video}"></video>
<p><a href="{report}">The training run</a></p>"""


def bars(values, count=20):
    """A histogram as the rectangles of an SVG picture of 100 x 40."""
    low, width = min(values), (max(values) - min(values)) / count or 1.0
    heights = [0] * count
    for value in values:
        heights[min(count - 1, int((value - low) / width))] += 1
    scale, step = 40 / max(heights), 100 / count
    boxes = ((i * step, 40 - n * scale, n * scale) for i, n in enumerate(heights))
    return "".join(f'<rect x="{x:g}" y="{y:.2f}" width="{step * 0.9:g}" height="{h:.2f}"/>' for x, y, h in boxes)


def main(*words, episodes=100):
    """``words``: a run directory, or settings of a run to make first. Returns the page's path."""
    if len(words) == 1 and Path(words[0]).is_dir():
        run_dir = Path(words[0])
    else:
        run_dir = Path(pql.train("task=pendulum", "algo=pql", "budget.seconds=20", *words).run_dir)
    found, video = pql.evaluate(run_dir, episodes=episodes), pql.record_video(run_dir, width=320, height=240)
    report = Path(pql.report(run_dir)["page"]).relative_to(run_dir)
    low, high = min(found["returns"]), max(found["returns"])
    numbers = {"mean": found["return_mean"], "median": found["return_median"], "low": low, "high": high}
    film = base64.b64encode(Path(video.path).read_bytes()).decode()
    more = {"bars": bars(found["returns"]), "video": film, "report": report, "episodes": episodes}
    page = run_dir / "evaluation.html"
    page.write_text(PAGE.format(run=run_dir.name, **numbers, **more))
    return page


if __name__ == "__main__":
    webbrowser.open(main(*sys.argv[1:]).resolve().as_uri())
