"""Exported policies: written as torch.export and ONNX programs, checked against the policy, loaded without its code.

Knows no training. Start reading at ``writer.py``; ``program.py`` is what a loaded file may contain.
"""
