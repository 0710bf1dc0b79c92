"""Assigns the beams of the next step to slots and blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.services.scheduler.core.plan import BeamMove
from quire.services.scheduler.core.sequences.sequence import Sequence
from quire.services.scheduler.core.step.plan_builder import PlanBuilder
from quire.services.scheduler.core.tables import SlotTables


@dataclass(frozen=True, slots=True)
class BeamMovePlan:
    """Assignment of child beams, in order: the slot that each continues and the slot that it gets."""

    parents: list[int]  # slots
    targets: list[int | None]  # the parent's slot, the slot of a beam that ended, or None: a new slot
    ended: list[int]  # slots that no child continues in
    num_blocks: int  # block positions that the assignment allocates


class BeamMover:
    """Assigns and moves the beams of a search, which all have the same length."""

    def __init__(self, tables: SlotTables) -> None:
        self._tables = tables

    def plan(self, slots: list[int], parents: list[int]) -> BeamMovePlan:
        """Assigns each child a slot: the first child of a parent continues in the parent's slot, others get slots of
        beams that ended, then new ones. `parents`: the index in `slots` of each child's parent. Changes nothing."""
        free_slots = [slot for index, slot in enumerate(slots) if index not in parents]
        targets: list[int | None] = []
        continued: set[int] = set()
        for parent in parents:
            if parent not in continued:
                continued.add(parent)
                targets.append(slots[parent])
            else:
                targets.append(free_slots.pop(0) if free_slots else None)
        begins_block = self._begins_block(slots[0])
        num_blocks = len(parents) - (0 if begins_block else len(continued))
        return BeamMovePlan([slots[parent] for parent in parents], targets, free_slots, num_blocks)

    def _begins_block(self, slot: int) -> bool:
        """Returns whether the next token is the first one of a block."""
        running = self._tables.running
        return int(running.num_computed[slot]) % running.block_size == 0

    def execute(self, builder: PlanBuilder, moves: BeamMovePlan, sequences: list[Sequence], tokens: list[int]) -> None:
        """Moves the children, which have these `sequences` and `tokens`, into their slots: shares full blocks,
        schedules copies of partial blocks, appends and schedules the next token. All parents are read before any of
        them gets its next token."""
        children = list(zip(moves.parents, moves.targets, sequences, tokens, strict=True))
        fresh = self._begins_block(moves.parents[0])
        for parent, target, sequence, token in children:
            if target is None:
                self._admit(builder, parent, sequence, fresh)
            elif target != parent:
                self._rebase(builder, parent, target, token, fresh)
        for parent, target, _, token in children:
            if target is not None:
                self._continue_beam(builder, target, token, stays=target == parent, fresh=fresh)

    def _admit(self, builder: PlanBuilder, parent: int, sequence: Sequence, fresh: bool) -> None:
        """Admits a child in a new slot with the parent's full blocks and a copy of its partial block; `fresh`: the
        next token begins a block. The next token is already among the child's known tokens."""
        num_computed = int(self._tables.running.num_computed[parent])
        shared, last = self._split(parent)
        slot = self._tables.admit(builder, sequence, shared, num_computed, num_computed)
        blocks = self._tables.append_blocks(builder, slot)
        if not fresh:
            builder.copy(last, blocks)
        self._tables.schedule_tokens(builder, slot, 1)

    def _rebase(self, builder: PlanBuilder, parent: int, slot: int, token: int, fresh: bool) -> None:
        """Moves a child into the slot of a beam that ended: releases that beam's blocks, shares the parent's full
        ones and copies its partial one. `fresh`: the next token begins a block."""
        shared, last = self._split(parent)
        self._tables.rebase(builder, slot, parent, shared)
        blocks = self._tables.append_blocks(builder, slot, in_plan=fresh)
        if not fresh:
            builder.copy(last, blocks)
        builder.move(BeamMove(slot, parent, token, (0,) * len(blocks) if fresh else tuple(blocks)))

    def _split(self, slot: int) -> tuple[list[int], list[int]]:
        """Returns the full blocks of a slot, and its partial block of each KV group, if there is one."""
        table, size = self._tables.kv.table(slot), self._tables.groups.num
        end = int(self._tables.running.num_computed[slot]) // self._tables.running.block_size * size
        return list(table[:end]), list(table[end : end + size])

    def _continue_beam(self, builder: PlanBuilder, slot: int, token: int, *, stays: bool, fresh: bool) -> None:
        """Appends the next token to the beam in `slot` and schedules it."""
        if stays:
            builder.move(BeamMove(slot, slot, token, (0,) * self._tables.groups.num))
            if fresh:
                self._tables.append_blocks(builder, slot)
        self._tables.append_tokens(np.array([slot]), np.array([token], dtype=np.int32))
        self._tables.schedule_tokens(builder, slot, 1)
