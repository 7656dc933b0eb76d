"""One budget of extents, shared by units and pages.

Owns which extent is leased to whom, and the copies that evacuation asks of the runner. Touches no tensor.
"""

from dataclasses import dataclass

from hybridserve.replicas.arena.layout import ArenaLayout
from hybridserve.replicas.arena.tenancy import Tenancy


@dataclass(frozen=True)
class Copies:
    """(source id, destination id) pairs of moved slots.

    Every source, of either kind, is read before any destination is written.
    """

    pages: tuple[tuple[int, int], ...] = ()
    units: tuple[tuple[int, int], ...] = ()


class Arena:
    """Allocator of units and pages. Because either kind can be evacuated, it is full only when packing is."""

    def __init__(self, layout: ArenaLayout, num_extents: int) -> None:
        self.layout = layout
        self.num_extents = num_extents
        self._free_extents = list(range(num_extents - 1, -1, -1))
        self._units = Tenancy("unit", layout.units_per_extent, layout.unit_id)
        self._pages = Tenancy("page", layout.pages_per_extent, layout.page_entry)
        # destination -> source of moves not yet handed out, so that a twice moved page is copied once
        self._unit_moves: dict[int, int] = {}
        self._page_moves: dict[int, int] = {}

    @property
    def free_extents(self) -> int:
        return len(self._free_extents)

    @property
    def units_used(self) -> int:
        return self._units.used

    @property
    def pages_used(self) -> int:
        return self._pages.used

    @property
    def units_total(self) -> int:
        """Units there could be beside the pages in use."""
        return (self.num_extents - self.layout.extents_for(0, self.pages_used)) * self.layout.units_per_extent

    @property
    def pages_total(self) -> int:
        """Pages there could be beside the units in use."""
        return (self.num_extents - self.layout.extents_for(self.units_used, 0)) * self.layout.pages_per_extent

    def fits(self, units: int, pages: int) -> bool:
        """Whether `units` more units and `pages` more pages can be had, evacuation included."""
        needed = self.layout.extents_for(self.units_used + units, self.pages_used + pages)
        return needed <= self.num_extents

    def allocate_unit(self, table: list[int]) -> bool:
        """Append a unit to `table`, or return False. Models without linear layers need none: a no-op."""
        if not self.layout.unit_bytes:
            return True
        return self._allocate(self._units, self._pages, self._page_moves, 1, table)

    def allocate_pages(self, count: int, table: list[int]) -> bool:
        """Append `count` pages to `table`, or change no table and return False."""
        if not self.layout.page.nbytes:
            return True
        return self._allocate(self._pages, self._units, self._unit_moves, count, table)

    def release(self, units: list[int], pages: list[int]) -> None:
        """Free everything in the two tables and empty them."""
        # a move into a freed slot must not overwrite whoever has its bytes next
        for moves, table in ((self._unit_moves, units), (self._page_moves, pages)):
            if moves:
                for slot_id in table:
                    moves.pop(slot_id, None)
        self._free_extents += self._units.release(units)
        self._free_extents += self._pages.release(pages)

    def drain_copies(self) -> Copies:
        """Copies that must be done before anything of the next step is computed; each is handed out once."""
        copies = Copies(
            tuple((src, dst) for dst, src in self._page_moves.items()),
            tuple((src, dst) for dst, src in self._unit_moves.items()),
        )
        self._page_moves.clear()
        self._unit_moves.clear()
        return copies

    def check_integrity(self) -> None:
        """Assert that every extent, unit and page is free or owned exactly once."""
        units, pages = self._units.check_integrity(), self._pages.check_integrity()
        free = set(self._free_extents)
        assert len(free) == len(self._free_extents), "an extent is free twice"
        assert not (units & pages or units & free or pages & free), "an extent has two tenants"
        assert len(units) + len(pages) + len(free) == self.num_extents, "an extent is lost"

    def _allocate(
        self, kind: Tenancy, other: Tenancy, other_moves: dict[int, int], count: int, table: list[int]
    ) -> bool:
        missing = -(-(count - kind.free) // kind.slots_per_extent)
        if missing > len(self._free_extents) + other.spare_extents:
            return False
        for _ in range(missing):
            kind.lease(self._free_extents.pop() if self._free_extents else self._evacuate(other, other_moves))
        for _ in range(count):
            kind.take(table)
        return True

    def _evacuate(self, kind: Tenancy, pending: dict[int, int]) -> int:
        extent, moves = kind.evacuate()
        for old, new in moves:
            # a slot moved twice before the runner saw it still has its bytes at the first address
            pending[new] = pending.pop(old, old)
        return extent
