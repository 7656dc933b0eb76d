"""The allocator under random use: a shadow memory follows every byte's owner through evacuations."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hybridserve.replicas.arena.arena import Arena
from hybridserve.replicas.arena.layout import plan_arena
from hybridserve.replicas.models.specs import FullAttentionSpec, LinearAttentionSpec

ONE_UNIT = (LinearAttentionSpec(4, 8, 64, 64, 4), FullAttentionSpec(8, 1, 16, 16, 1e4))
MANY_UNITS = (LinearAttentionSpec(1, 1, 8, 8, 2), FullAttentionSpec(4, 2, 32, 16, 1e4))
MIXES = {
    "one unit an extent": ONE_UNIT,
    "many units an extent": MANY_UNITS,
    "linear only": ONE_UNIT[:1],
    "full only": ONE_UNIT[1:],
}


class ArenaMachine(RuleBasedStateMachine):
    """Holders allocate and free; `shadow` maps each slot's address to what was written there."""

    @initialize(mix=st.sampled_from(sorted(MIXES)), num_extents=st.integers(1, 7))
    def build(self, mix, num_extents):
        layout = plan_arena(MIXES[mix], 4, 16)
        self.arena = Arena(layout, num_extents)
        self.holders: list[tuple[list[int], list[int], list[str], list[str]]] = []
        self.shadow: dict[tuple[str, int], str] = {}
        self.stamps = 0

    def _stamp(self, kind, table, names):
        for slot in table[len(names) :]:
            self.stamps += 1
            names.append(f"{kind}{self.stamps}")
            self.shadow[kind, slot] = names[-1]

    def _settle(self):
        copies = self.arena.drain_copies()
        moved = [(("page", dst), self.shadow[("page", src)]) for src, dst in copies.pages]
        moved += [(("unit", dst), self.shadow[("unit", src)]) for src, dst in copies.units]
        self.shadow.update(moved)

    @rule(pages=st.integers(0, 60))
    def arrive(self, pages):
        units, table = [], []
        fits = self.arena.fits(1, pages)
        got = self.arena.allocate_unit(units) and self.arena.allocate_pages(pages, table)
        assert got == fits, "fits() and allocate disagree"
        if not got:
            # what was moved for it stays where it is, and is copied with the next step
            self.arena.release(units, table)
            assert not units and not table
            return
        # contents are written after the copies, as a step does
        self._settle()
        holder = (units, table, [], [])
        self._stamp("unit", units, holder[2])
        self._stamp("page", table, holder[3])
        self.holders.append(holder)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), pages=st.integers(1, 5))
    def grow(self, data, pages):
        units, table, _, names = data.draw(st.sampled_from(self.holders))
        before = list(table)
        fits = self.arena.fits(0, pages)
        assert self.arena.allocate_pages(pages, table) == fits
        self._settle()
        if not fits:
            assert table == before
        self._stamp("page", table, names)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), settle=st.booleans())
    def leave(self, data, settle):
        index = data.draw(st.integers(0, len(self.holders) - 1))
        units, table, _, _ = self.holders.pop(index)
        self.arena.release(units, table)
        if settle:
            self._settle()

    @rule(pages=st.integers(1, 40), data=st.data())
    def churn_within_a_step(self, pages, data):
        """Allocate, free another, allocate again before the runner sees any copy."""
        first, second = ([], []), ([], [])
        self.arena.allocate_unit(first[0]) and self.arena.allocate_pages(pages, first[1])
        if self.holders:
            gone = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
            self.arena.release(gone[0], gone[1])
        self.arena.allocate_unit(second[0]) and self.arena.allocate_pages(pages, second[1])
        self._settle()
        for units, table in (first, second):
            self._stamp("unit", units, [])
            self._stamp("page", table, [])
            self.arena.release(units, table)

    @invariant()
    def sound(self):
        if not hasattr(self, "arena"):
            return
        self.arena.check_integrity()
        # what is moved and not yet copied still lies where it was
        of_units, of_pages = self.arena._unit_moves, self.arena._page_moves
        for units, table, unit_names, page_names in self.holders:
            assert [self.shadow["unit", of_units.get(u, u)] for u in units] == unit_names
            assert [self.shadow["page", of_pages.get(p, p)] for p in table] == page_names

    def teardown(self):
        for units, table, _, _ in getattr(self, "holders", []):
            self.arena.release(units, table)
        if hasattr(self, "arena"):
            self.arena.check_integrity()
            assert self.arena.free_extents == self.arena.num_extents


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_pages_come_from_the_fullest_extent():
    arena = Arena(plan_arena(ONE_UNIT, 4, 16), 3)
    per_extent = arena.layout.pages_per_extent
    tables = [[] for _ in range(3)]
    arena.allocate_pages(per_extent, tables[0])
    arena.allocate_pages(per_extent - 1, tables[1])
    arena.allocate_pages(2, tables[2])
    # frees most of the first extent; the next pages must not start to fill it again
    arena.release([], tables[0])
    arena.allocate_pages(1, tables[0])
    entries = {entry // arena.layout.slabs_per_extent for entry in tables[2] + tables[0]}
    assert len(entries & {e // arena.layout.slabs_per_extent for e in tables[1]}) == 1
    arena.check_integrity()


def test_a_unit_is_had_by_evacuating_half_empty_page_extents():
    layout = plan_arena(ONE_UNIT, 4, 16)
    arena = Arena(layout, 2)
    tables = [[] for _ in range(2 * layout.pages_per_extent)]
    for table in tables:
        assert arena.allocate_pages(1, table)
    unit: list[int] = []
    assert not arena.allocate_unit(unit), "nothing can be packed while every page is used"
    for table in tables[::2]:
        arena.release([], table)
    assert arena.free_extents == 0
    assert arena.allocate_unit(unit)
    copies = arena.drain_copies()
    assert copies.pages and not copies.units
    moved = {dst for _, dst in copies.pages}
    assert moved <= {entry for table in tables for entry in table}
    assert arena.drain_copies().pages == ()
    arena.check_integrity()


@pytest.mark.parametrize("mix", sorted(MIXES))
def test_an_arena_fills_to_its_last_slot(mix):
    layout = plan_arena(MIXES[mix], 4, 16)
    arena = Arena(layout, 4)
    units: list[list[int]] = []
    while layout.unit_bytes and arena.fits(1, 0):
        units.append([])
        assert arena.allocate_unit(units[-1])
    assert arena.units_used == 4 * layout.units_per_extent
    for table in units:
        arena.release(table, [])
    pages: list[int] = []
    assert arena.allocate_pages(4 * layout.pages_per_extent, pages)
    assert not arena.fits(0, 1) or not layout.page.nbytes
    arena.release([], pages)
    assert arena.free_extents == 4
