"""Exported policies: written as torch.export and ONNX programs, compared with the policy, loaded without its code.

Contains no training code. Start reading at ``writer.py``; ``onnx_check.py`` defines what an untrusted file may contain.
"""
