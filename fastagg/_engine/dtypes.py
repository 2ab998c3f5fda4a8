"""The tensors that can be aggregated: their dtypes, and their numbers in the kernels."""

from __future__ import annotations

import torch

FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGER = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)
DTYPE_CODE = {dtype: code for code, dtype in enumerate(FLOATING + INTEGER)} | {torch.bool: 8}  # bool is read as uint8
PLAIN = (torch.Tensor, torch.nn.Parameter)  # exactly these types: a subclass may mean anything
