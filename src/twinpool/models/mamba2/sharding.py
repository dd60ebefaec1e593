"""How ranks share a Mamba2 layer: heads with the group whose B and C they use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from twinpool.errors import ModelError
from twinpool.models.shard import COLUMNS, ROWS, Cut, Share, cut, on_first


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Keys:
    """What a family's config calls its heads, their width, the groups of B and C, and the width of those."""

    heads: str
    head_dim: str
    groups: str
    state_size: str

    def channels(self, config: Any) -> tuple[tuple[int, int], ...]:
        """Pieces of what is convolved: x | B | C."""
        heads, head_dim, groups, state_size = (
            getattr(config, key) for key in (self.heads, self.head_dim, self.groups, self.state_size)
        )
        return (heads, head_dim), (groups, state_size), (groups, state_size)

    def inputs(self, config: Any) -> tuple[tuple[int, int], ...]:
        """Pieces of the projection: z | x | B | C | dt."""
        x, *others = self.channels(config)
        return x, x, *others, (x[0], 1)

    def check(self, config: Any, share: Share) -> None:
        """Raise ModelError for several groups that the ranks do not divide; a single one is on every rank."""
        groups = getattr(config, self.groups)
        if groups > 1 and groups % share.ranks:
            raise ModelError(
                f"--tp-size {share.ranks} does not divide the model's {groups} Mamba groups; use a divisor of {groups}."
            )

    def joint_norm(self, config: Any) -> bool:
        """Whether the gated norm is over the columns of all ranks, which is so for a single group."""
        return bool(getattr(config, self.groups) == 1)


# Of Granite, Bamba and Falcon-H1.
MAMBA2_KEYS = Mamba2Keys(
    heads="mamba_n_heads", head_dim="mamba_d_head", groups="mamba_n_groups", state_size="mamba_d_state"
)


def mamba2_cuts(module: str, keys: Mamba2Keys) -> dict[str, Cut]:
    """Cuts of a layer whose names have `module` (a regular expression) before those of its parts."""
    return {
        rf"{module}\.in_proj\.(weight|bias)": cut(0, keys.inputs),
        rf"{module}\.conv1d\.(weight|bias)": cut(0, keys.channels),
        rf"{module}\.(norm\.weight|A_log|D|dt_bias)": ROWS,
        rf"{module}\.out_proj\.weight": COLUMNS,
        rf"{module}\.out_proj\.bias": on_first,
    }


def narrow_inner(part: Any, ranks: int) -> None:
    """A share's config where the inner width is mamba_expand * hidden_size: the factor need not stay whole, as transformers checks."""
    object.__setattr__(part, "mamba_expand", part.mamba_expand / ranks)
