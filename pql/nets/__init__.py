"""Networks: MLPs, critic ensembles, value networks, policies, image encoders, action distributions.

Imports no algorithm and no replay. Start at ``mlp.py``; ``encoders.py`` is for images.
"""
