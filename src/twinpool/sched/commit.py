"""Applying what a step gave: tokens, checkpoints, finishes."""

from __future__ import annotations

from twinpool.request import Finish, Int32Array, Phase
from twinpool.sched.book import Book, Delta
from twinpool.sched.publish import note_checkpoint, publish_chunk, release
from twinpool.sched.sequence import Sequence
from twinpool.step import StepPlan, StepResult, TokenLogprob


def apply(book: Book, plan: StepPlan, result: StepResult) -> None:
    """Commit one step. Steps are committed in the order they were planned."""
    errors = dict(result.errors)
    for index, (row, sequence) in enumerate(book.in_flight.pop(plan.step)):
        sequence.in_flight -= 1
        sequence.committed = row.end
        note_checkpoint(book, sequence, row)
        if index in errors:
            spoil(sequence, errors[index])
        elif row.tokens is not None and sequence.finish is None:
            publish_chunk(book, sequence)
        token = result.tokens[index]
        if row.sample and sequence.finish is None:
            assert token is not None
            if plan.repeat > 1:
                _accept_run(book, sequence, result.runs[index])
            else:
                _accept(book, sequence, token, result.logprobs[index] if result.logprobs else None)
        release_if_finished(book, sequence)
    if plan.n_decode_rows:
        for _ in range(plan.repeat):
            book.ratio.decay()


def spoil(sequence: Sequence, message: str) -> None:
    """A row that could not be computed ends its request only; one that has its whole answer (with overlap a row more is under way) keeps
    it. What the row left in memory is worth nothing.
    """
    sequence.spoilt = True
    if sequence.finish is None:
        sequence.finish = Finish("error", message=message)


def _accept(book: Book, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> None:
    """Append a sampled token, and see whether the request ends with it."""
    request = sequence.request
    request.tokens[request.n_tokens] = token
    request.n_tokens += 1
    request.phase = Phase.DECODE
    if request.first_token_s is None:
        request.first_token_s = book.clock.now_s()
    book.tell(Delta(request, (token,), (logprob,) if logprob is not None else ()))
    if token in request.end_tokens:
        sequence.finish = Finish("stop", matched=token)
    elif request.n_output >= request.params.max_tokens:
        sequence.finish = Finish("length")


def _accept_run(book: Book, sequence: Sequence, tokens: Int32Array) -> None:
    """Append the tokens of several steps; only the last of them can end the request (sched/stride.py)."""
    request = sequence.request
    request.tokens[request.n_tokens : request.n_tokens + len(tokens)] = tokens
    request.n_tokens += len(tokens)
    book.tell(Delta(request, tuple(tokens.tolist())))
    if request.n_output >= request.params.max_tokens:
        sequence.finish = Finish("length")


def release_if_finished(book: Book, sequence: Sequence) -> None:
    """Let go of a finished request once no step that names it is in flight, then tell its owner.

    With overlap the step after the last token is already under way: it computes the state after that very token, which is what
    the next turn of a conversation resumes from. So the end is told one step late, with the prefix already in the tree.
    """
    finish = sequence.finish
    if finish is None or sequence.in_flight or sequence.request.phase is Phase.FINISHED:
        return
    release(book, sequence, publish=finish.reason != "error" and not sequence.spoilt)
    sequence.request.phase = Phase.FINISHED
    book.tell(Delta(sequence.request, finish=finish))
