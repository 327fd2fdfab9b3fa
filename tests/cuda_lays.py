"""Operands of products in all storage that a caller may pass, and the rule by which a tensor map takes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from dg_core.backends.cuda.operands import AS_IS, Step

ROWS, K = 0, 1
# grouping -> whether A and B have an axis of groups
GROUPINGS = {
    "dense": (False, False),
    "batched": (True, True),
    "contiguous": (False, True),
    "psum": (False, True),
    "masked": (True, True),
}


@dataclass(frozen=True)
class Lay:
    """Where matrices lie: which axis is the inner one, elements from one of it to the next, elements that
    follow each line, elements before the first, and elements that follow each matrix or, where they are
    ``woven``, line by line in turns, each line of all of them."""

    inner: int = K
    step: int = 1
    pad: int = 0
    first: int = 0
    between: int = 0
    woven: bool = False

    def __call__(self, x: Tensor, grouped: bool = False) -> Tensor:
        """The values of ``x``, a matrix or a vector (``grouped``: several in front of each other), among 0xFF
        bytes (NaN in every float format)."""
        groups = x.shape[0] if grouped else 1
        rows, columns = (*x.shape[int(grouped) :], 1)[:2]
        line, lines = (columns, rows) if self.inner == K else (rows, columns)
        length = max(line * self.step + self.pad, 1)
        if self.woven:
            between, apart = length, length * groups + self.between
        else:
            between, apart = length * lines + self.between, length
        count = self.first + (apart * lines if self.woven else between * groups) + self.step
        buffer = torch.full((count * x.element_size(),), 0xFF, dtype=torch.uint8, device=x.device)
        strides = (apart, self.step) if self.inner == K else (self.step, apart)
        view = buffer.view(x.dtype).as_strided((groups, rows, columns), (between, *strides), self.first)
        view = view if grouped else view[0]
        view = view if x.dim() == view.dim() else view[..., 0]
        view.copy_(x)
        return view


PLAIN = Lay()
lays = st.builds(
    Lay,
    st.sampled_from((ROWS, K)),
    st.sampled_from((1, 1, 1, 2)),
    st.sampled_from((0, 0, 1, 3, 4, 16)),
    st.sampled_from((0, 0, 0, 1, 16)),
    st.sampled_from((0, 0, 1, 4, 16)),
    st.booleans(),
)


def loadable(x: Tensor, major: int) -> bool:
    """The rule of a tensor map: one axis contiguous, the other 16 bytes times something apart and beyond what
    it steps over, an aligned start, and matrices 16 bytes times something apart; a stride of one element
    means nothing."""
    size = x.element_size()
    if x.dim() == 3 and x.shape[0] > 1 and (x.stride(0) * size % 16 or not x.stride(0)):
        return False
    major, other = major - 2, -1 - major
    if x.data_ptr() % 16 or (x.shape[major] > 1 and x.stride(major) != 1):
        return False
    apart = x.stride(other)
    return x.shape[other] == 1 or (apart * size % 16 == 0 and apart >= x.shape[major])


def check_form(step: Step, given: Tensor, out: Tensor, majors: tuple[int, ...], grouped: bool) -> None:
    """``out`` is what ``step`` promises, loadable along one of ``majors``; and what stands at the promised
    addresses is ``out``."""
    form = step.result
    assert form.major in majors
    assert loadable(out, form.major)
    groups, *shape = out.shape if grouped else (1, *out.shape)
    assert (groups, tuple(shape), out.dtype, True) == (form.groups, form.shape, form.dtype, form.aligned)
    other, size = 1 - form.major, out.element_size()
    assert form.strides[form.major] == 1
    assert form.strides[other] * size % 16 == 0
    assert form.strides[other] >= form.shape[form.major]
    assert form.apart * size % 16 == 0
    assert (form.apart == 0) == (groups == 1)
    where = (form.apart, *form.strides)
    assert torch.equal(bits(out.as_strided((groups, *shape), where)), bits(out if grouped else out[None]))
    assert (out is given) == (step.kind == AS_IS) == (not step.words)
    if step.kind != AS_IS:
        assert step.workspace == out.untyped_storage().nbytes()
        assert f"workspace of {step.workspace} bytes" in step.words


def bits(x: Tensor) -> Tensor:
    """Its bits, which are equal where NaN is not."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return x.clone(memory_format=torch.contiguous_format).view(kinds[x.element_size()])
