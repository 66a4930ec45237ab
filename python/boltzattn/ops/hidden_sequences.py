"""Notice masks that hide every key of a sequence, which inverted masks do."""

from __future__ import annotations

import math
import warnings

from torch import Tensor

# How many calls with a mask are looked at. A mask with the wrong polarity hides every key of the
# first sequence without padding, so the first calls tell, and later ones cost nothing.
CHECKED = 16
_left = CHECKED


def notice(attn_mask: Tensor | None, key_mask: Tensor | None) -> None:
    """Warn once. Masks on other devices than the CPU are not read: that would wait for them."""
    global _left
    mask = attn_mask if key_mask is None else key_mask
    if _left == 0 or mask is None or mask.device.type != "cpu":
        return
    _left -= 1
    if (key_mask is not None and _hides_all(key_mask, 1, True)) or (
        attn_mask is not None and _hides_all(attn_mask, 2, False)
    ):
        _left = 0
        warnings.warn(
            "a mask hides every key of a sequence, whose output is then 0. True means ignore in "
            "key_padding_mask, and may attend in attn_mask (in modules: may not attend, as in "
            "nn.MultiheadAttention): is a mask inverted? This warns once, and looks at the first "
            f"{CHECKED} calls with a mask only",
            stacklevel=2,
        )


def _hides_all(mask: Tensor, axes: int, hidden: bool) -> bool:
    """Whether all entries along the last axes are hidden: `hidden` if bool, otherwise -inf."""
    for axis, stride in enumerate(mask.stride()[:-axes]):
        if stride == 0 and mask.shape[axis] > 0:
            mask = mask.narrow(axis, 0, 1)  # all alike
    if mask.numel() == 0:
        return False
    kept = mask != (hidden if not mask.is_floating_point() else -math.inf)
    return not bool(kept.flatten(-axes).any(-1).all())


def start_again() -> None:
    """Forget earlier calls; for tests."""
    global _left
    _left = CHECKED
