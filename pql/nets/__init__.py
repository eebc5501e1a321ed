"""Networks: MLPs, ensembles of critics, value networks, policies, encoders of images, action distributions.

Knows observations and sizes, no algorithm and no replay. Start reading at ``mlp.py``; ``encoders.py`` is for images.
"""
