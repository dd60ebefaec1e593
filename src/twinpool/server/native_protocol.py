"""Body of POST /generate, the native route: text or token ids in, text and meta_info out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from pydantic import Field, PlainValidator

from twinpool.errors import BadRequest
from twinpool.request import SamplingParams
from twinpool.server.openai_protocol import is_ids
from twinpool.server.protocol import Body, CountTokens, Refused, SamplingBody, Seed

DEFAULT_NEW_TOKENS = 128

_OWN_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "logprobs": "top_logprobs_num"}
_NO_MEDIA = "this server reads text only"
NATIVE_REFUSED = {
    "image_data": Refused(_NO_MEDIA),
    "video_data": Refused(_NO_MEDIA),
    "audio_data": Refused(_NO_MEDIA),
    "input_embeds": Refused("prompts are text or token ids here"),
    "lora_path": Refused("adapters are not loaded here"),
    "session_params": Refused(
        "sessions are not kept here; send the whole conversation, the prefix cache does the rest"
    ),
    "return_hidden_states": Refused("hidden states are not returned here", (False,)),
    "logprob_start_len": Refused("log-probabilities of the prompt are not computed here", (-1,)),
    "token_ids_logprob": Refused("use top_logprobs_num"),
    "custom_logit_processor": Refused("code is not taken from requests"),
}


class NativeSampling(SamplingBody):
    """sampling_params of /generate."""

    max_new_tokens: CountTokens | None = None
    min_new_tokens: CountTokens | None = None
    sampling_seed: Seed | None = None


def _text(value: object) -> object:
    """text: null, a string, or strings."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(text, str) for text in value):
        return value
    raise ValueError("it must be a string or an array of strings, and not empty")


def _input_ids(value: object) -> object:
    """input_ids: null, token ids, or lists of token ids."""
    if value is None or (isinstance(value, list) and value and (is_ids(value) or all(is_ids(item) for item in value))):
        return value
    raise ValueError("it must be an array of token ids or an array of those, and not empty")


def _rid(value: object) -> object:
    """rid: null, a string, or strings, one a prompt."""
    texts = [value] if isinstance(value, str) else value
    if texts is None or (isinstance(texts, list) and all(isinstance(text, str) and text for text in texts)):
        return value
    raise ValueError("it must be a string or an array of strings, one a prompt, none empty")


class GenerateBody(Body):
    """POST /generate."""

    text: Annotated[Any, PlainValidator(_text)] = None
    input_ids: Annotated[Any, PlainValidator(_input_ids)] = None
    sampling_params: NativeSampling | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    top_logprobs_num: Annotated[int, Field(ge=0, le=20)] | None = None
    return_text_in_logprobs: bool | None = None
    rid: Annotated[Any, PlainValidator(_rid)] = None
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None

    @property
    def is_batch(self) -> bool:
        """Whether the prompt came as an array of prompts, and the reply is an array."""
        return isinstance(self.text, list) or (self.input_ids is not None and not is_ids(self.input_ids))

    def prompts(self) -> list[str | list[int]]:
        """The prompts, texts or token ids. Raises BadRequest unless exactly one of text and input_ids is given."""
        if (self.text is None) == (self.input_ids is None):
            raise BadRequest("give either text or input_ids.", field="text")
        given = self.text if self.text is not None else self.input_ids
        return list(given) if self.is_batch else [given]

    def rids(self, n_prompts: int) -> list[str | None]:
        """The client's names of the requests, one a prompt. Raises BadRequest if there are more or fewer."""
        if self.rid is None:
            return [None] * n_prompts
        names = [self.rid] if isinstance(self.rid, str) else self.rid
        if len(names) != n_prompts:
            raise BadRequest(
                f"there are {n_prompts} prompts and {len(names)} rids: give one rid a prompt.", field="rid"
            )
        return list(names)

    @contextmanager
    def naming_its_fields(self) -> Iterator[None]:
        """Within it a BadRequest says this route's names, where the engine's are those of the OpenAI API."""
        try:
            yield
        except BadRequest as error:
            names = {**_OWN_NAMES, "prompt": "text" if self.text is not None else "input_ids"}
            if error.field not in names:
                raise
            own = names[error.field]
            # The prompt is called that in sentences on every route; the other names are names of fields.
            said = str(error) if error.field == "prompt" else str(error).replace(error.field, own)
            raise BadRequest(said, field=own) from None

    def params(self) -> SamplingParams:
        """Sampling as the engine wants it. Raises BadRequest on a value out of range."""
        asked = self.sampling_params or NativeSampling()
        if self.top_logprobs_num and not self.return_logprob:
            raise BadRequest("top_logprobs_num needs return_logprob=true.", field="top_logprobs_num")
        return asked.sampling(
            max_tokens=DEFAULT_NEW_TOKENS if asked.max_new_tokens is None else asked.max_new_tokens,
            min_tokens=asked.min_new_tokens,
            seed=asked.sampling_seed,
            logprobs=(self.top_logprobs_num or 0) if self.return_logprob else None,
        )
