"""Policies on a model hub: ``pql pull`` and ``pql push``, with the extra ``hub`` (huggingface_hub).

Only data are exchanged: safetensors, JSON and a text. ``docs/export.md`` describes the files. Start reading at
``repo.py``.
"""
