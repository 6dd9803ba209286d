"""How many places dynamic tables have, and what else the flags say of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from recsuite.config.presets import AUTO
from recsuite.config.sections import TablesConfig
from recsuite.datasets.schema import Table
from recsuite.errors import UserError
from recsuite.sharding.dynamic.spec import BUCKET_WIDTH, DynamicSpec

# Places for each id of the data. Buckets are taken by chance: half full, one in three hundred has no place
# for one id more.
PLACES_PER_ID = 2
# Of a place beside its row: id, time and count, marks, and the optimizer's number.
BYTES_BESIDE_A_ROW = 8 + 8 + 4 + 2 + 4
# And of the ids that wait for admission.
BYTES_OF_WAITING = 8 + 8 + 4 + 2


def specs_of(
    tables: Sequence[Table],
    config: TablesConfig,
    widths: Mapping[str, int],
    init_std: float,
    seed: int,
    memory: int,
    is_stream: bool = False,
) -> dict[str, DynamicSpec]:
    """What each dynamic table is told, by its name. widths: of each table; memory: bytes that all ranks have
    for tables; is_stream: whether ids come that nobody has counted.

    Raises:
        UserError: when --capacity names a table that is not dynamic, asks a stream for a count, or for more
            than fits the memory.
    """
    dynamic = [table for table in tables if table.feature.is_dynamic]
    wanted = config.capacities()
    names = [table.name for table in dynamic]
    for name in wanted:
        if name and name not in names:
            raise UserError(
                f"--capacity {config.capacity} names the table {name}, and the dynamic tables are "
                f"{', '.join(names) or 'none'}; give one of these, or no name for all of them."
            )
    if is_stream:
        _check_stream(dynamic, wanted, config)
    shares = _shares(dynamic, is_stream)
    # A share is that of the tables when they have grown: only then is it what they take in the end.
    bytes_of_a_place = {name: _bytes_of_a_place(config, widths[name]) * _growth(config) for name in names}
    places = _places(dynamic, wanted, shares, bytes_of_a_place, memory)
    _check_memory(places, bytes_of_a_place, config, memory)
    return {
        name: DynamicSpec(
            name,
            widths[name],
            capacity,
            capacity * _growth(config),
            seed=seed,
            init_std=init_std,
            admit=config.admit,
            evict=config.evict,
            ttl=config.expiry.amount,
            half_life=config.halving.amount,
            unit=config.unit,
            distribution=config.distribution,
            grow=config.grow,
        )
        for name, capacity in places.items()
    }


def _check_stream(tables: Sequence[Table], wanted: Mapping[str, str], config: TablesConfig) -> None:
    """Refuse to count the ids of files for a stream, which must not know those that come later."""
    name = next((table.name for table in tables if wanted.get(table.name, wanted[""]) == AUTO), None)
    if name is not None:
        growth = f", which may grow to {_growth(config)} times as many" if config.grow else ""
        raise UserError(
            f"--capacity {config.capacity} is auto for the table {name}, which counts the ids of all files, "
            "and a stream must not know those that come later; give a number of places such as "
            f"10000{growth}, or a share of the memory such as 25%."
        )


def _check_memory(
    places: Mapping[str, int], bytes_of_a_place: Mapping[str, int], config: TablesConfig, memory: int
) -> None:
    """Refuse what the planner would: to find out how many rows each rank has of it takes memory too."""
    needed = sum(bytes_of_a_place[name] * number for name, number in places.items())
    if needed > memory:
        growth = f", which --grow may make {_growth(config)} times as many," if config.grow else ""
        raise UserError(
            f"--capacity {config.capacity} asks for {sum(places.values()):,} places{growth} and "
            f"{needed / 2**20:,.0f} MiB, and all ranks together have {memory / 2**20:,.0f} MiB for tables; "
            "give a smaller --capacity, --max_growth or --embedding_dim, or start more processes."
        )


def _shares(tables: Sequence[Table], is_stream: bool) -> dict[str, float]:
    """What each table gets of a share of the memory for all: as much as it has of all ids; in a stream, where
    these are not known, each as much as another.
    """
    numbers = {table.name: 1 if is_stream else table.rows for table in tables}
    return {name: number / sum(numbers.values()) for name, number in numbers.items()}


def _growth(config: TablesConfig) -> int:
    """How many times its first capacity a table may reach by doubling."""
    return 1 << (config.max_growth.bit_length() - 1) if config.grow else 1


def _bytes_of_a_place(config: TablesConfig, embedding_dim: int) -> int:
    return 4 * embedding_dim + BYTES_BESIDE_A_ROW + (BYTES_OF_WAITING if config.admit > 1 else 0)


def _places(
    tables: Sequence[Table],
    wanted: Mapping[str, str],
    shares: Mapping[str, float],
    bytes_of_a_place: Mapping[str, int],
    memory: int,
) -> dict[str, int]:
    """Places of each table: whole buckets, one at least; no more than a share of the memory has room for."""
    found = {}
    for table in tables:
        value = wanted.get(table.name, wanted[""])
        if value.endswith("%"):
            part = 1.0 if table.name in wanted else shares[table.name]
            share = float(value[:-1]) / 100 * memory * part
            buckets = int(share / bytes_of_a_place[table.name]) // BUCKET_WIDTH
        else:
            buckets = -(-(PLACES_PER_ID * table.rows if value == AUTO else int(value)) // BUCKET_WIDTH)
        found[table.name] = BUCKET_WIDTH * max(1, buckets)
    return found
