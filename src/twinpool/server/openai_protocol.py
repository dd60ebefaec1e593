"""Bodies of /v1/chat/completions and /v1/completions: OpenAI's fields, the usual extensions, what is turned down."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainValidator

from twinpool.errors import BadRequest
from twinpool.server.protocol import Body, CountTokens, Refused, SamplingBody, Seed, kind_of

DEFAULT_COMPLETION_TOKENS = 16

_NO_TOOLS = "function calling is not done here"
_NO_GRAMMAR = "constrained decoding is not done here"
_NO_AUDIO = "this server reads and writes text only"
# Arguments of the rendering, not variables of the template; a template of the request's would be code of the request's.
_SERVERS_OWN = frozenset(
    ("self", "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize",
     "continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict",
     "return_assistant_tokens_mask", "tokenizer_kwargs")
)  # fmt: skip
_REFUSED_BY_BOTH = {
    "store": Refused("nothing is stored here", (False,)),
    "response_format": Refused(_NO_GRAMMAR + ", ask for JSON in the prompt", ({"type": "text"},)),
    "json_schema": Refused(_NO_GRAMMAR),
    "regex": Refused(_NO_GRAMMAR),
    "ebnf": Refused(_NO_GRAMMAR),
    "structural_tag": Refused(_NO_GRAMMAR),
    "lora_path": Refused("adapters are not loaded here"),
    "session_params": Refused(
        "sessions are not kept here; send the whole conversation, the prefix cache does the rest"
    ),
    "return_hidden_states": Refused("hidden states are not returned here", (False,)),
    "service_tier": Refused("there is one tier only", ("auto", "default")),
}

CHAT_REFUSED = {
    **_REFUSED_BY_BOTH,
    "tools": Refused(_NO_TOOLS, ([],)),
    "tool_choice": Refused(_NO_TOOLS, ("none",)),
    "parallel_tool_calls": Refused(_NO_TOOLS, (False, True)),
    "functions": Refused(_NO_TOOLS, ([],)),
    "function_call": Refused(_NO_TOOLS, ("none",)),
    "modalities": Refused(_NO_AUDIO, (["text"],)),
    "audio": Refused(_NO_AUDIO),
    "prediction": Refused("predicted outputs are not used here"),
    "reasoning_effort": Refused("it has no meaning for this model, see chat_template_kwargs", ("none",)),
    "verbosity": Refused("it has no meaning for this model", ("medium",)),
    "web_search_options": Refused("this server does not search"),
    "moderation": Refused("this server does not moderate"),
}

COMPLETION_REFUSED = {
    **_REFUSED_BY_BOTH,
    "suffix": Refused("the model continues text, it does not fill gaps", ("",)),
    "best_of": Refused("candidates are not ranked here, use n", (1,)),
}


class StreamOptions(Body):
    """stream_options. include_obfuscation (padding against eavesdroppers on sizes) is accepted only when off."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


def _content(value: object) -> object:
    """A message's content: null, a string, or parts of which each is text."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(f"it must be a string or an array of parts, not {kind_of(value)}")
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else kind_of(part)
        if kind != "text":
            raise ValueError(f"part {index} is of type '{kind}', and {_NO_AUDIO}")
        if set(part) - {"type", "text"} or not isinstance(part.get("text"), str):
            raise ValueError(f"part {index} must have a type and a text, a string, and nothing else")
    return value


def _template_options(value: dict[str, Any] | None) -> dict[str, Any] | None:
    """chat_template_kwargs: variables of the model's template, none of the names that the server gives itself."""
    taken = sorted(_SERVERS_OWN & set(value or ()))
    if taken:
        raise ValueError(f"'{taken[0]}' is not the request's to set, give only variables of the model's chat template")
    return value


class Message(Body):
    """One message. The fields that only other models fill may come back as null or empty, as clients send them."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Any, PlainValidator(_content)] = None
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    def for_template(self) -> dict[str, object]:
        """What a chat template reads. Raises BadRequest when there is no content."""
        if self.content is None:
            raise BadRequest(f"a message of the {self.role} has no content.", field="messages")
        message: dict[str, object] = {"role": self.role, "content": self.content}
        if self.name is not None:
            message["name"] = self.name
        return message


class OpenAIBody(SamplingBody):
    """Fields of both routes. user, metadata and the like say who asks and change nothing."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: Seed | None = None
    min_tokens: CountTokens | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk. Raises BadRequest for options of a stream that is none."""
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options needs stream=true.", field="stream_options")
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatBody(OpenAIBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: CountTokens | None = None
    max_completion_tokens: CountTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, AfterValidator(_template_options)] = None

    def wanted_tokens(self) -> int | None:
        """The answer's length limit, None for whatever fits. Raises BadRequest when two limits disagree."""
        both = (self.max_completion_tokens, self.max_tokens)
        if None not in both and both[0] != both[1]:
            raise BadRequest(
                f"max_completion_tokens is {both[0]} and max_tokens is {both[1]}: give one.",
                field="max_completion_tokens",
            )
        return both[0] if both[0] is not None else both[1]

    def wanted_logprobs(self) -> int | None:
        """How many alternatives to report, None for no log-probabilities.

        Raises BadRequest for alternatives to nothing.
        """
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs=true.", field="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


def _prompt(value: object) -> list[Any]:
    """prompt: a string, strings, token ids, or lists of token ids; always as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if is_ids(value):
            return [value]
        if all(isinstance(item, str) for item in value) or all(is_ids(item) for item in value):
            return value
    raise ValueError(
        "it must be a string, an array of strings, an array of token ids or an array of those, and not empty"
    )


def is_ids(value: object) -> bool:
    """Whether a JSON value is a list of token ids (possibly empty)."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 31 for item in value)


class CompletionBody(OpenAIBody):
    """POST /v1/completions."""

    prompt: Annotated[list[Any], PlainValidator(_prompt)]
    max_tokens: CountTokens | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None

    def wanted_tokens(self) -> int:
        """The answer's length limit; 16 if none is given, as in the OpenAI API.

        Raises BadRequest for what echo cannot do.
        """
        if self.echo and self.logprobs is not None:
            raise BadRequest(
                "logprobs of an echoed prompt are not computed here: leave out echo or logprobs.", field="echo"
            )
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
