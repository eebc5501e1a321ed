"""A categorical critic on an embedding of observation and action, from which it also predicts the next embedding.

Source: Voelcker et al. 2025 (REPPO). F is the size of the embedding. This file contains no losses.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from pql.nets.distributions import hl_gauss
from pql.nets.mlp import ACTIVATIONS, Layers, NetInput, Reads, mlp
from pql.types import Obs

ZERO_SCALE = 40.9
"""Factor on the logits' offset (the repository's): with it, nearly all initial mass lies next to a value of 0."""


class Embedder(Reads):
    """Observation groups [B, ...] and action [B, A] -> embedding [B, F]: an MLP whose last layer is linear.

    Args:
        layers: of the MLP; its last width is F.
    """

    def __init__(self, source: NetInput, action_size: int, layers: Layers):
        super().__init__(source)
        *hidden, self.size = layers.hidden
        self.net = mlp(source.size + action_size, replace(layers, hidden=hidden), self.size)

    def forward(self, obs: Obs, action: Tensor) -> Tensor:
        return self.net(torch.cat((self.features(obs), action), -1))


class EmbeddingCritic(nn.Module):
    """Critic: observation groups [B, ...] and action [B, A] -> embedding, prediction of the next one, logits [B, Z].

    Logits have a learned offset, proportional to the histogram of the value 0, so that values are near 0 at first.

    Args:
        embedder: (obs, action) -> embedding [B, F].
        size: F.
        layers: activation and normalisation of value and prediction, each with one hidden layer of F units.
        atoms: support [Z] of the values.
        sigma: standard deviation of histograms, in distances between atoms.
    """

    atoms: Tensor

    def __init__(self, embedder: nn.Module, size: int, layers: Layers, atoms: Tensor, sigma: float):
        super().__init__()
        self.embedder, inner = embedder, replace(layers, hidden=(size,))
        self.activation = ACTIVATIONS[layers.activation]()
        self.head, self.predictor = mlp(size, inner, len(atoms)), mlp(size, inner, size)
        self.zero = nn.Parameter(hl_gauss(torch.zeros(()), atoms, sigma))
        self.register_buffer("atoms", atoms, persistent=False)

    def forward(self, obs: Obs, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return the prediction of the next embedding [B, F] and the logits [B, Z]."""
        x = self._activated(self.embedder(obs, action))
        return self.predictor(x), self._logits(x)

    def value(self, obs: Obs, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return the value [B] and the embedding [B, F]."""
        embedding = self.embedder(obs, action)
        return self._logits(self._activated(embedding)).softmax(-1) @ self.atoms, embedding

    def _activated(self, embedding: Tensor) -> Tensor:
        return self.activation(embedding.clone())  # some activations work in place

    def _logits(self, x: Tensor) -> Tensor:
        return self.head(x) + ZERO_SCALE * self.zero
