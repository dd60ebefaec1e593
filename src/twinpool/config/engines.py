"""What engines do differently with the same flags, as far as memory is concerned: one row an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRules:
    """How one engine reads flags and charges memory.

    charge_padding_slot: slot 0 comes out of the budget (reference 1.3; versions differ).
    conv_dtype: of convolution windows unless a flag says otherwise; None: bfloat16, but the model's own for float32 and
    float16 models. kv_follows_checkpoint: the KV cache takes the dtype that the checkpoint was calibrated for.
    graphs: memory for captured graphs is part of the default of --mem-fraction-static (reference 1.2), and nothing
    limits that reserve. default_running_with_drafts: --max-running-requests where speculation needs one and none is
    given; None: it is asked for. one_arena: states and KV share one buffer of pages. skip_decode_lock: a request does
    not lock its matched prefix while it decodes (3.3). exact_index: keys of sparse indices are as wide as the KV cache and
    tokens of pools that are not full are kept with the states; else keys are fp8 and nothing else is charged (1.7).
    """

    name: str
    what: str
    charge_padding_slot: bool = True
    conv_dtype: str | None = None
    kv_follows_checkpoint: bool = True
    graphs: bool = True
    default_running_with_drafts: int | None = None
    skip_decode_lock: bool = False
    one_arena: bool = False
    exact_index: bool = False


TWINPOOL = EngineRules(
    name="twinpool",
    what="twinpool serve, as it divides memory at boot",
    kv_follows_checkpoint=False,
    graphs=False,
    one_arena=True,
    exact_index=True,
)
SGLANG = EngineRules(
    name="sglang", what="SGLang 0.5.23: the padding slot is charged", conv_dtype="bfloat16",
    default_running_with_drafts=48,
)  # fmt: skip
SGLANG_UNPADDED = EngineRules(
    name="sglang-unpadded", what="SGLang versions that do not charge the padding slot", conv_dtype="bfloat16",
    charge_padding_slot=False, default_running_with_drafts=48,
)  # fmt: skip
TWO_POOL_ENGINES = (SGLANG, SGLANG_UNPADDED, TWINPOOL)
