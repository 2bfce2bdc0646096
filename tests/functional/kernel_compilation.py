"""Run by `test_kernels.py` in a process of its own: compile each kernel for an H100 and print its name."""

from __future__ import annotations

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from medfedaug.functional import kernels

TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float64: "*fp64", torch.int64: "*i64"}
STARTED = ("_augment", "_augment_backward", "_interpolate", "_interpolate_backward", "_moments", "_share")
STARTED += ("_share_backward", "_sums")
compiled = set()


class Compiled:
    """In the place of a kernel: compile where it would be started."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return self.compile

    def compile(self, *args, **constants):
        names = self.kernel.arg_names
        values = dict(zip(names, args, strict=False)) | constants
        signature, fixed = {}, {}
        for number, parameter in enumerate(self.kernel.params):
            value = values[parameter.name]
            if parameter.is_constexpr or value is None:
                signature[parameter.name], fixed[number,] = "constexpr", value
            else:
                signature[parameter.name] = TYPES[value.dtype] if isinstance(value, torch.Tensor) else "i32"
        binary = triton.compile(ASTSource(self.kernel, signature, fixed), target=GPUTarget("cuda", 90, 32))
        assert binary.asm["cubin"]
        assert ".local" not in binary.asm["ptx"]  # nothing spills
        compiled.add(self.kernel.__name__)


for name in STARTED:
    setattr(kernels, name, Compiled(getattr(kernels, name)))
for dtype in (torch.float32, torch.bfloat16):
    images, channels, hidden = 16, 512, 32
    x = torch.zeros(images, channels, 8, 8, dtype=dtype)
    numbers, count = torch.zeros(channels), torch.tensor(0)
    moments = kernels.moments(x)
    sums = kernels.gradient_sums(x, x, moments)
    draws = torch.zeros(2 * images * channels + 1)
    settings = 0.0, 1.0, -1.0
    kernels.augment(x, moments, draws, *[numbers] * 4, *[count] * 3, 1e-6, 0.01, *settings)
    kernels.augment_backward(x, x, moments, sums, draws, numbers, numbers, 1e-6, *settings)
    kernels.interpolate(x, moments, *[numbers] * 7, 1e-5, 0.0, 0.1, images // 2)
    kernels.interpolate_backward(x, x, moments, sums, *[numbers] * 4, None, 1e-5, 0.0, images // 2)
    adapter = torch.zeros(hidden, 2 * channels), torch.zeros(hidden), torch.zeros(2, hidden), torch.zeros(2)
    z = torch.zeros(images, 1)
    share, hidden_layer = kernels.adapted_share(moments, numbers, numbers, *adapter, z, 1e-5)
    kernels.adapted_share_backward(x, moments, sums, share, hidden_layer, *[numbers] * 3, *adapter, z, 1e-5)
    kernels.interpolate_adapted(x, moments, *[numbers] * 4, *adapter, None, 1e-5)
print(*sorted(compiled))
