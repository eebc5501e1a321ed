"""Progress of a run: the terminal or notebook, ``metrics.jsonl``, TensorBoard, wandb, trackio and swanlab.

Reads rows of numbers, never tensors of a training step. Start reading at ``sinks.py``.
"""
