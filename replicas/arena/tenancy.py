"""The slots of one kind (units, or pages) in the extents leased to that kind.

Owns which slot is free and which table holds it. Knows nothing of the other kind, or where extents come from.
A holder keeps a plain list of slot ids, its table; moving a slot patches the table in place.
"""

from collections.abc import Callable


class Tenancy:
    """Slots of one kind, taken from the fullest extent that has room, so that sparse extents can empty."""

    def __init__(self, name: str, slots_per_extent: int, slot_id: Callable[[int, int], int]) -> None:
        """`slot_id(extent, slot)` gives the id that tables hold; ids must differ between slots."""
        self.name = name
        self.slots_per_extent = slots_per_extent
        self.used = 0
        self._slot_id = slot_id
        self._free: dict[int, list[int]] = {}
        # extents by how many of their slots are used; dicts as ordered sets keep choices deterministic
        self._by_used: list[dict[int, None]] = [{} for _ in range(slots_per_extent + 1)]
        self._owner: dict[int, tuple[list[int], int]] = {}
        self._place: dict[int, tuple[int, int]] = {}
        self._held: dict[int, dict[int, None]] = {}

    @property
    def num_extents(self) -> int:
        return len(self._free)

    @property
    def free(self) -> int:
        """Free slots in the extents already leased."""
        return self.num_extents * self.slots_per_extent - self.used

    @property
    def spare_extents(self) -> int:
        """Extents that would become empty if the used slots were packed."""
        return self.num_extents - -(-self.used // self.slots_per_extent) if self.slots_per_extent else 0

    def lease(self, extent: int) -> None:
        assert extent not in self._free, f"extent {extent} is leased to {self.name} already"
        self._free[extent] = list(range(self.slots_per_extent - 1, -1, -1))
        self._held[extent] = {}
        self._by_used[0][extent] = None

    def take(self, table: list[int]) -> None:
        """Append a free slot's id to `table`. There must be one."""
        table.append(self._occupy(table, len(table)))
        self.used += 1

    def release(self, table: list[int]) -> list[int]:
        """Free every slot of `table`, empty it, and return the extents that are now without a used slot."""
        empty = []
        for slot_id in table:
            extent = self._drop(slot_id)
            if len(self._free[extent]) == self.slots_per_extent:
                empty.append(extent)
        table.clear()
        for extent in empty:
            self._unlease(extent)
        return empty

    def evacuate(self) -> tuple[int, list[tuple[int, int]]]:
        """Move the slots of the emptiest extent into other extents' free slots; `spare_extents` must be > 0.

        Returns:
            the extent, no longer leased, and (old id, new id) of each moved slot.
        """
        assert self.spare_extents > 0
        extent = next(e for level in self._by_used for e in level)
        held = self._held.pop(extent)
        del self._free[extent]
        del self._by_used[len(held)][extent]
        moves = []
        for old in held:
            table, position = self._owner.pop(old)
            del self._place[old]
            table[position] = self._occupy(table, position)
            moves.append((old, table[position]))
        return extent, moves

    def check_integrity(self) -> set[int]:
        """Assert that every slot is free or owned exactly once; return the leased extents."""
        for slot_id, (table, position) in self._owner.items():
            assert table[position] == slot_id, f"{self.name} {slot_id}: its owner holds {table[position]}"
        assert self._owner.keys() == self._place.keys()
        assert self.used == len(self._place), f"{self.name}: {self.used} counted, {len(self._place)} owned"
        places = set(self._place.values())
        assert len(places) == len(self._place), f"{self.name}: two ids in one place"
        for extent, free in self._free.items():
            held = self._held[extent]
            assert len(free) == len(set(free)), f"{self.name}: a slot of extent {extent} is free twice"
            assert len(free) + len(held) == self.slots_per_extent, f"{self.name}: extent {extent} lost a slot"
            assert all((extent, slot) not in places for slot in free), f"{self.name}: a free slot is owned"
            assert all(self._place[i][0] == extent for i in held)
            assert extent in self._by_used[len(held)], f"{self.name}: extent {extent} is filed wrongly"
            assert held, f"{self.name}: empty extent {extent} was not given back"
        assert sum(len(level) for level in self._by_used) == len(self._free)
        return set(self._free)

    def _occupy(self, table: list[int], position: int) -> int:
        extent = self._fullest_with_room()
        slot = self._free[extent].pop()
        slot_id = self._slot_id(extent, slot)
        self._place[slot_id] = (extent, slot)
        self._owner[slot_id] = (table, position)
        self._held[extent][slot_id] = None
        self._moved(extent, +1)
        return slot_id

    def _fullest_with_room(self) -> int:
        for used in range(self.slots_per_extent - 1, -1, -1):
            if self._by_used[used]:
                return next(iter(self._by_used[used]))
        raise AssertionError(f"no free {self.name}")

    def _drop(self, slot_id: int) -> int:
        extent, slot = self._place.pop(slot_id)
        del self._owner[slot_id]
        del self._held[extent][slot_id]
        self._free[extent].append(slot)
        self.used -= 1
        self._moved(extent, -1)
        return extent

    def _moved(self, extent: int, change: int) -> None:
        """Refile an extent whose number of used slots has just changed by `change`."""
        used = self.slots_per_extent - len(self._free[extent])
        del self._by_used[used - change][extent]
        self._by_used[used][extent] = None

    def _unlease(self, extent: int) -> None:
        del self._free[extent]
        del self._held[extent]
        del self._by_used[0][extent]
