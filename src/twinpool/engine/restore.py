"""Bringing prefixes back from the host layer by layer while the forward runs: what can wait, and who waits for what."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import torch

from twinpool.engine.copies import Part, Span, TierCopies
from twinpool.engine.tensors import KvViews, Memory, StateViews
from twinpool.models.spec import ModelSpec
from twinpool.request import Int32Array
from twinpool.step import Freed, HostCopy, HostFill, Order, OrdersFailed, SlotOrder, StoreCopy

Move = SlotOrder | HostCopy
_NONE: Int32Array = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class LayerParts:
    """Every page and slot cut into parts, in the order in which they are copied: what belongs to no layer, then the layers' own as a
    forward comes to them. kv, states: the number of the part that an attention layer, or a linear one, waits for.
    """

    parts: tuple[Part, ...]
    kv: tuple[int, ...]
    states: tuple[int, ...]

    @classmethod
    def undivided(cls, memory: Memory) -> LayerParts:
        """One part, all of it, that every layer waits for."""
        return cls((memory.tiers.whole,), kv=(0,) * len(memory.kv), states=(0,) * len(memory.states))

    @classmethod
    def of(cls, spec: ModelSpec, memory: Memory) -> LayerParts:
        """A part for each layer's keys and values, and one for each layer's state."""
        own: list[Part] = []
        kv: list[int] = []
        states: list[int] = []
        for layer in spec.with_exact_index(page_tokens=memory.page_size).layers:
            if layer.linear is not None:
                own.append(Part(slot=_spans(memory, memory.states[len(states)], 0)))
                states.append(len(own))
            if layer.attention is not None:
                own.append(Part(page=_spans(memory, memory.kv[len(kv)], memory.arena.kv_offset_bytes)))
                kv.append(len(own))
        return cls((_rest(memory.tiers.whole, own), *own), tuple(kv), tuple(states))


@dataclass(slots=True)
class Waiting:
    """Orders of a step that may wait for its forward: loads from the host, and what is done with the slots they fill."""

    moves: list[Move] = field(default_factory=list)
    _pages: list[Int32Array] = field(default_factory=list)
    _host_pages: list[Int32Array] = field(default_factory=list)
    _slots: set[int] = field(default_factory=set)
    _host_slots: set[int] = field(default_factory=set)

    def take(self, order: Order) -> bool:
        """Whether the order waits, too."""
        if isinstance(order, HostCopy) and not order.to_host:
            self._pages.append(order.pages)
            self._host_pages.append(order.host_pages)
            if order.slot:
                self._slots.add(order.slot)
                self._host_slots.add(order.host_slot)
        elif isinstance(order, SlotOrder) and not self._slots.isdisjoint((order.dst, order.src)):
            self._slots.update(slot for slot in (order.dst, order.src) if slot)
        else:
            return False
        self.moves.append(order)
        return True

    def concerns(self, order: Order) -> bool:
        """Whether an order that does not wait reads or writes what the waiting ones read or write."""
        if not self.moves or isinstance(order, SlotOrder):
            return False
        pages = order.ids if isinstance(order, Freed) and order.kind == "pages" else _NONE
        slots: tuple[int, ...] = ()
        if isinstance(order, Freed) and order.kind == "slots":
            slots = tuple(order.ids.tolist())
        elif isinstance(order, HostCopy | StoreCopy):
            pages, slots = order.pages, (order.slot,)
        if not self._slots.isdisjoint(slots) or _meet(pages, self._pages):
            return True
        if not isinstance(order, HostCopy | HostFill):
            return False
        return order.host_slot in self._host_slots or _meet(order.host_pages, self._host_pages)


class Restore:
    """Moves of one step, made in a thread of their own, part by part; models.step_batch.Arrivals for the forward meanwhile.

    load_s: seconds that the copies took, once `finish` has returned.
    """

    def __init__(self, moves: Sequence[Move], layers: LayerParts, copies: TierCopies) -> None:
        self._moves, self._layers, self._copies = moves, layers, copies
        self._done = 0
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self.load_s = 0.0
        self._thread = threading.Thread(target=self._run, name="twinpool-restore", daemon=True)
        self._thread.start()

    def await_kv(self, layer: int) -> None:
        """Return when all of an attention layer's pages are there. Raises OrdersFailed when a copy failed."""
        self._await(self._layers.kv[layer])

    def await_state(self, layer: int) -> None:
        """Return when all of a linear layer's states are there. Raises OrdersFailed when a copy failed."""
        self._await(self._layers.states[layer])

    def finish(self) -> None:
        """Wait for all of it. Raises OrdersFailed when a copy failed."""
        self._thread.join()
        self._await(len(self._layers.parts) - 1)

    def _await(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._done > number or self._error is not None)
        if self._error is not None:
            raise OrdersFailed(f"a copy from the host failed: {self._error}") from self._error

    def _run(self) -> None:
        began_s = time.perf_counter()
        try:
            for part in self._layers.parts:
                for order in self._moves:
                    self._copies.move(order, part)
                with self._changed:
                    self._done += 1
                    self._changed.notify_all()
        except Exception as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
        self.load_s = time.perf_counter() - began_s


def _spans(memory: Memory, views: KvViews | StateViews, base_bytes: int) -> tuple[Span, ...]:
    """Where a layer's views lie within a page or a slot."""
    spans: list[Span] = []
    for view in sorted((getattr(views, one.name) for one in fields(views)), key=torch.Tensor.data_ptr):
        start = view.data_ptr() - memory.buffer.data_ptr() - base_bytes
        end = start + view[0].nbytes
        if spans and spans[-1][1] >= start:  # keys and values lie one after another, or are the same
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        elif end > start:
            spans.append((start, end))
    return tuple(spans)


def _rest(whole: Part, own: Sequence[Part]) -> Part:
    """What no layer has: padding, and what is kept beside the layers."""
    return Part(
        page=_without(whole.page, [span for part in own for span in part.page]),
        slot=_without(whole.slot, [span for part in own for span in part.slot]),
    )


def _without(whole: tuple[Span, ...], taken: list[Span]) -> tuple[Span, ...]:
    ((at, end),) = whole
    left: list[Span] = []
    for start, stop in sorted(taken):
        if at < start:
            left.append((at, start))
        at = max(at, stop)
    return (*left, (at, end)) if at < end else tuple(left)


def _meet(ids: Int32Array, others: list[Int32Array]) -> bool:
    return bool(len(ids)) and any(np.isin(ids, other).any() for other in others)
