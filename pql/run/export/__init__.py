"""Exported policies: written as torch.export and ONNX programs, compared with the policy, loaded without its code.

Contains no training code. Start reading at ``writer.py``; ``program.py`` defines what a loaded file may contain.
"""
