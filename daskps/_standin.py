"""A net that computes where others wait or train: what a benchmark of rounds between busy ranks runs.

It is fixed, and looks at none of the user's rows: what is measured with it predicts how another net runs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_SIDE = 28
_FEATURES = 32 * 4 * 4


class StandIn(nn.Module):
    """Two convolutions and two dense layers, on images of noise.

    Parameters
    ----------
    n_parameters : int
        About so many; the dense layers are made as wide as that needs.
    n_classes : int
    images_per_row : float
        How many images are computed for each row that comes in.
    """

    def __init__(self, n_parameters: int, n_classes: int, images_per_row: float) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        spare = n_parameters - sum(parameter.numel() for parameter in self.convolutions.parameters())
        width = max(1, round(spare / (_FEATURES + 1 + n_classes)))
        self.dense = nn.Sequential(nn.Linear(_FEATURES, width), nn.ReLU(), nn.Linear(width, n_classes))
        self.images_per_row = images_per_row
        # No buffer: ranks would average it.
        self.images = torch.empty(0, 1, _SIDE, _SIDE)

    def forward(self, X: Tensor) -> Tensor:
        """Logits of as many of the images as there are rows."""
        n_images = max(1, round(self.images_per_row * len(X)))
        if len(self.images) < n_images:
            self.images = torch.randn(n_images, 1, _SIDE, _SIDE)
        logits = self.dense(self.convolutions(self.images[:n_images]))
        return logits[torch.arange(len(X)) % n_images]
