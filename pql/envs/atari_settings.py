"""Keywords of the Atari games, for the learner and for remote actors, which need no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AtariSimSettings:
    """Keywords of a remote actor's games.

    Attributes:
        game: ``ale_py``'s name: ``pong``, ``ms_pacman``, ...
        autoreset: ``same_step`` or ``next_step`` (a filler row follows each end).
        noop_max: a game begins with 0 .. ``noop_max`` frames without an action, drawn for every game.
        sticky: probability, at every frame of the console, that the last action is repeated instead.
        full_actions: all 18 actions instead of those that the game uses.
        life_loss: a lost life terminates (for learning; the game continues, so ``first`` is not set).
        fire_reset: press FIRE once when a game begins, if the game has that action.
        max_episode_steps: time limit in actions, four frames each; 27,000 correspond to 30 minutes of play.
        threads: threads that step the consoles of each group; None or 0: one per core.
    """

    game: str = "pong"
    autoreset: str = "same_step"
    noop_max: int = 30
    sticky: float = 0.0
    full_actions: bool = False
    life_loss: bool = False
    fire_reset: bool = False
    max_episode_steps: int = 27_000
    threads: int | None = None


@dataclass(frozen=True)
class AtariSettings(AtariSimSettings):
    """Keywords of ``pql.envs.atari.AtariVec``.

    Attributes:
        groups: consoles are divided into this many groups of neighbours for ``send`` and ``recv``.
    """

    groups: int = 1
