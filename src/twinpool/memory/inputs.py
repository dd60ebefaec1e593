"""What the budget needs to know of one rank: model facts and resolved settings as a MemoryRequest. Server and planner share it."""

from __future__ import annotations

from twinpool.config.engines import TWINPOOL, EngineRules
from twinpool.config.resolve import Resolved
from twinpool.errors import ConfigError
from twinpool.memory.ledger import MemoryRequest
from twinpool.models.spec import ModelSpec
from twinpool.units import count


def memory_request(
    spec: ModelSpec,
    resolved: Resolved,
    *,
    pre_load_bytes: int,
    available_bytes: int,
    rules: EngineRules = TWINPOOL,
    reserve_draft_states: bool = True,
    fixed_bytes: int = 0,
    weights_origin: str = "measured",
) -> MemoryRequest:
    """One rank's request; sizes are charged as its largest pipeline stage needs them (reference 1.3, 1.4, 1.8).

    pre_load_bytes, available_bytes: free before and after the weights. fixed_bytes: rings of ReplaySSM.
    weights_origin: how the difference of the two is known.
    Raises ConfigError or ModelError for parallel sizes that do not divide.
    """
    tp, pp, dcp = attention_ranks(tp=resolved.tp_size, dp=resolved.dp_size), resolved.pp_size, resolved.dcp_size
    spec.check_tp(tp)
    if tp % dcp:
        raise ConfigError(
            f"--dcp-size {dcp} does not divide the {count(tp, 'tensor-parallel rank')} of a worker, which share its KV."
        )
    stage_share = spec.stage_share(pp)
    if rules.exact_index:
        spec = spec.with_exact_index(page_tokens=resolved.page_size)
    kv_dtype, drafts = resolved.kv_cache_dtype, resolved.speculative_num_draft_tokens
    kv_bytes = spec.stage_kv_bytes_per_token(pp=pp, kv_dtype=kv_dtype, tp=tp, dcp=dcp)
    if drafts:
        kv_bytes += spec.draft_kv_bytes_per_token(kv_dtype=kv_dtype, tp=tp, dcp=dcp)
    return MemoryRequest(
        pre_load_bytes=pre_load_bytes,
        available_bytes=available_bytes,
        mem_fraction_static=resolved.mem_fraction_static,
        context_len=resolved.context_len,
        conv_bytes=spec.conv_bytes_per_slot(conv_dtype=resolved.mamba_conv_dtype, tp=tp),
        ssm_bytes=spec.ssm_bytes_per_slot(ssm_dtype=resolved.mamba_ssm_dtype, tp=tp),
        kv_bytes_per_token=kv_bytes,
        slots_per_request=resolved.slots_per_request,
        page_size=resolved.page_size,
        ratio=resolved.mamba_full_memory_ratio,
        max_mamba_cache_size=resolved.max_mamba_cache_size,
        max_running_requests=resolved.max_running_requests,
        max_total_tokens=resolved.max_total_tokens,
        radix_cache=resolved.radix_cache,
        dp=resolved.dp_size,
        dcp=dcp,
        stage_share=stage_share,
        draft_tokens=drafts,
        reserve_draft_states=reserve_draft_states,
        extra_slot_bytes=spec.side_state_bytes,
        fixed_bytes=fixed_bytes,
        charge_padding_slot=rules.charge_padding_slot,
        one_arena=rules.one_arena,
        origins={**resolved.origins, "weights": weights_origin},
    )


def attention_ranks(*, tp: int, dp: int) -> int:
    """Ranks that share a worker's heads: workers of data-parallel attention split the tensor-parallel ranks (1.8).

    Raises ConfigError when they do not divide.
    """
    if tp > 1 and tp % dp:
        raise ConfigError(
            f"--dp-size {dp} does not divide --tp-size {tp}: workers of data-parallel attention share the ranks."
        )
    return max(1, tp // dp)
