"""Tensors to the flat buffer that travels, and back: what a rank does in every round."""

import torch

from daskps._packing import FlatBuffer

from .profile import PROFILE


class Pack:
    params = PROFILE.sizes
    param_names = ("values",)

    def setup(self, values):
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.tensors = [torch.randn(values - values // 2), torch.randn(values // 2)]
        self.buffer = FlatBuffer(self.tensors)
        self.packed = self.buffer.pack(self.tensors, 1.0, 16.0).copy()

    def time_pack(self, values):
        self.buffer.pack(self.tensors, 1.0, 16.0)

    def time_unpack(self, values):
        self.buffer.unpack(self.packed)
