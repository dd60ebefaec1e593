"""What goes into the budget (MemoryRequest) and what comes out (Ledger): values only, no arithmetic of pools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SLACK = "slack"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequest:
    """Everything the division of one rank's memory depends on (reference 1.1, 1.3 to 1.5).

    pre_load_bytes, available_bytes: free memory before and after the weights were loaded.
    ratio: state : KV; max_mamba_cache_size (slots over all dp workers) beats it. max_running_requests: of all workers.
    conv_bytes, ssm_bytes: one slot of *all* linear layers on one tensor-parallel rank; kv_bytes_per_token: of the
    attention layers of the pipeline stage that has most of them. stage_share: (linear layers of the largest stage,
    linear layers of the model). draft_tokens: D; reserve_draft_states: False where no state is kept per draft step
    (ReplaySSM, a prefill-only worker). extra_slot_bytes: side states of each slot; fixed_bytes: rings that do not
    depend on the number of slots.
    activation_reserve_bytes: least slack. charge_padding_slot: False for engines that do not count slot 0.
    one_arena: slots take whole KV pages (ours); False for engines with two buffers.
    origins: name of a value here to where it came from ('flag', 'model default', ...), shown in the ledger.
    """

    pre_load_bytes: int
    available_bytes: int
    mem_fraction_static: float
    context_len: int
    conv_bytes: int
    ssm_bytes: int
    kv_bytes_per_token: int
    slots_per_request: int
    page_size: int = 1
    ratio: float = 0.9
    max_mamba_cache_size: int | None = None
    max_running_requests: int | None = None
    max_total_tokens: int | None = None
    radix_cache: bool = True
    draft_tokens: int = 0
    reserve_draft_states: bool = True
    dp: int = 1
    dcp: int = 1
    stage_share: tuple[int, int] = (1, 1)
    extra_slot_bytes: int = 0
    fixed_bytes: int = 0
    multimodal_bytes: int = 0
    activation_reserve_bytes: int = 0
    charge_padding_slot: bool = True
    one_arena: bool = True
    origins: Mapping[str, str] = field(default_factory=dict)

    @property
    def stage_conv_bytes(self) -> int:
        """Convolution windows of one slot, in the largest stage."""
        return self.conv_bytes * self.stage_share[0] // self.stage_share[1]

    @property
    def stage_slot_bytes(self) -> int:
        """One slot in the largest stage, which every stage is charged (reference 1.3)."""
        return (self.conv_bytes + self.ssm_bytes) * self.stage_share[0] // self.stage_share[1]

    @property
    def stage_extra_bytes(self) -> int:
        """Side states of one slot in the largest stage."""
        return self.extra_slot_bytes * self.stage_share[0] // self.stage_share[1]

    @property
    def page_bytes(self) -> int:
        """One KV page; 0 without attention layers."""
        return self.page_size * self.kv_bytes_per_token

    @property
    def hybrid(self) -> bool:
        """Whether there is a state to keep."""
        return self.stage_slot_bytes + self.stage_extra_bytes > 0

    @property
    def requests_per_worker(self) -> int | None:
        """--max-running-requests of one dp worker, at least 1; None when it was not given."""
        return None if self.max_running_requests is None else max(1, self.max_running_requests // self.dp)

    @property
    def charged_drafts(self) -> int:
        """Draft steps whose states are reserved."""
        return self.draft_tokens if self.reserve_draft_states else 0

    @property
    def padding_slots(self) -> int:
        """Slots charged on top of the usable ones."""
        return 1 if self.charge_padding_slot else 0


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """Named bytes. part_of: the line these bytes are already counted in; empty for lines that add up to the whole."""

    name: str
    bytes: int
    origin: str
    note: str = ""
    part_of: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """How one rank's memory is divided.

    whole_bytes: what lines without part_of add up to. budget_bytes: what both pools share after weights, slack and
    multimodal reserve.
    max_mamba_cache_size: K usable slots of this worker (0: no state pool); slot_bytes: one slot without arena rounding.
    conv_pool_bytes, ssm_pool_bytes, extra_pool_bytes: K + 1 slots, as allocated. draft_rows: request rows with states
    per draft step. kv_tokens: usable tokens of this rank (a multiple of page_size); logical_tokens: times dcp.
    kv_pool_bytes: with the padding page.
    max_running_requests: of this worker; slots_per_request: S.
    """

    whole_bytes: int
    budget_bytes: int
    max_mamba_cache_size: int
    slots_per_request: int
    slot_bytes: int
    conv_pool_bytes: int
    ssm_pool_bytes: int
    extra_pool_bytes: int
    draft_rows: int
    draft_conv_bytes: int
    draft_ssm_bytes: int
    page_size: int
    page_bytes: int
    kv_tokens: int
    logical_tokens: int
    kv_pool_bytes: int
    max_running_requests: int
    lines: tuple[LedgerLine, ...]
    warnings: tuple[str, ...] = ()

    @property
    def n_pages(self) -> int:
        """Usable KV pages, ids 1 to n_pages."""
        return self.kv_tokens // self.page_size

    def line(self, name: str) -> LedgerLine:
        """The line of that name. Raises KeyError."""
        for line in self.lines:
            if line.name == name:
                return line
        raise KeyError(name)
