"""Made by docs/make_flags.py."""

from pathlib import Path
from typing import TypedDict

class Flags(TypedDict, total=False):
    """The flags of `recsuite.fit`."""

    dataset: str
    cache_dir: str | Path
    rebuild: bool
    synthetic_ratings: int
    synthetic_kind: str
    split: str
    order: str
    test_fraction: float
    validation_fraction: float | str
    bad_rows: str
    max_bad_rows: float
    duplicates: str
    seen: str
    new_items: str
    history: int
    day_feature: str
    batch_size: int | str
    local_batch_size: int
    num_workers: int | str
    mp_context: str
    prefetch_factor: int
    worker_timeout: int
    vocabulary: str
    capacity: str
    admission_threshold: int
    eviction: str
    ttl: str
    half_life: str
    distribution: str
    max_load_factor: float
    max_growth: int
    storage: str
    cache_load_factor: float
    row_precision: str
    memory_budget: str
    storage_dir: str
    task: str
    embedding_dim: int
    mlp_dims: tuple[int, ...]
    history_weights: str
    negatives: int
    block: str
    num_blocks: int
    num_heads: int
    dropout: float
    initial_rows: str
    preset: str
    lr: float
    dense_lr: float
    weight_decay: float
    decay_power: float
    l2: float
    dense_weight_decay: float
    epochs: int
    patience: int
    pipeline: str
    capture: str
    precision: str
    data_device: str
    cpu_tables: str
    stream: bool | str
    window: str
    follow_data: bool
    partition_delay: str
    until: int
    checkpoint: str
    save_dir: str | Path
    move_aside: bool
    warm_start: str
    other_data: bool
    accept_changed_model: bool
    dump_every: int
    keep: int
    async_dump: bool
    cutoffs: tuple[int, ...]
    seed: int
    timeout: int
    report_dir: str | Path
    by: str
    profile: int
    tensorboard: bool
    format: str
    row_type: str
    user: str
    top: int
    follow: bool
    partitions: int
    min_count: int
