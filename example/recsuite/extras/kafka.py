"""Messages of a Kafka topic as the files of a stream: each partition is a file that grows.

Partitions are assigned by number, without a consumer group, and read up to given end offsets. So each machine
reads the same messages. The offsets up to which they are learned are in the checkpoint, and nowhere else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from recsuite.config.config import Config
from recsuite.datasets.preparation.cache import check_stream
from recsuite.datasets.preparation.growing_files import Growth
from recsuite.datasets.source import with_flags
from recsuite.datasets.streams import FilePosition
from recsuite.datasets.tables.files import JSON_BLOCK_BYTES, find_tables, schema_path
from recsuite.datasets.tables.schema_file import given_in, read_schema
from recsuite.datasets.tables.sections import Files
from recsuite.datasets.tables.source import TableSource, ensure_schema
from recsuite.datasets.tables.validation import validate
from recsuite.errors import UserError, counted, printable
from recsuite.files import explained
from recsuite.hooks import require_installed
from recsuite.runtime.console import say, stage
from recsuite.runtime.process import broadcast_from_rank0

if TYPE_CHECKING:
    from recsuite.datasets.tables.files import File

# Variable with the path of settings of librdkafka, such as for TLS and a login: no secret in a command line.
SETTINGS = "KAFKA_CONFIG"
# Most messages of one request, and the seconds to wait for them.
AT_ONCE, WAIT_SECONDS = 10_000, 0.2
# Seconds of one request, and of the first contact with a broker.
ASK_SECONDS, FIRST_SECONDS = 2.0, 30.0
# Seconds of waiting after which the reason is shown.
SAID_AFTER = 10.0
# Messages of a partition from which a schema is guessed.
SAMPLE = 1_000
# Characters of an unreadable message that are kept.
SHOWN = 200
# Start of an Arrow stream.
ARROW = b"\xff\xff\xff\xff"
NOT_IN_A_LINE = re.compile(rb"[\n\r\0]")

T = TypeVar("T")


def name_of(partition: int) -> str:
    """Name of a partition as a file of a stream. The order of names is that of the numbers."""
    return f"partition-{partition:05d}"


def number_of(name: str) -> int:
    """Number of the partition of a name."""
    return int(name.rpartition("-")[2])


class Topic:
    """Kafka topic of a stream, see `StreamFiles`. Connects when it is first asked. Not collective.

    The `bytes` of a position in a partition are the offset of the next message. config: its --stream names
    the topic, and --data_path the folder with the schema and the tables of users and items.
    """

    keeps_parts = False

    def __init__(self, config: Config) -> None:
        self.address = config.stream.topic
        self.servers, self.name = self.address.removeprefix("kafka://").split("/")
        self.notes: list[str] = []
        self._config = config
        # Below --timeout, so that the reason is reported before other ranks give up waiting for this one.
        self._seconds = config.runtime.timeout / 2
        self._consumer: Any = None
        self._fault, self._is_refused, self._was_asked = "", False, False

    def close(self) -> None:
        """Close the connections to the brokers."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def ends(self) -> dict[str, tuple[int, int]]:
        """Return the first retained offset and the end offset of each partition, by its name.

        With an open transaction the end is where it begins: what is before it does not change any more.

        Raises:
            UserError: when no broker answers, the login is refused, or there is no such topic.
        """
        consumer, seconds = self._connected(), self._seconds
        from confluent_kafka import TopicPartition

        if not self._was_asked:
            seconds = min(seconds, FIRST_SECONDS)
        # Of all requests together: other ranks wait for the answers.
        until = time.monotonic() + seconds
        partitions = self._retried(lambda: self._partitions(consumer), until)
        ask = functools.partial(consumer.get_watermark_offsets, timeout=ASK_SECONDS)
        extents = {
            name_of(number): self._retried(functools.partial(ask, TopicPartition(self.name, number)), until)
            for number in partitions
        }
        self._was_asked = True
        return extents

    def source(self) -> TableSource:
        """Return the data set without its events: they are no files. A missing schema is guessed and written.

        Raises:
            UserError: see `ends`, and when the messages do not tell the schema.
        """
        data = self._config.data
        written = schema_path(data.data_path)
        ensure_schema(written, self._sample)
        schema = read_schema(written)
        self._refuse_named(written, schema.files)
        tables = find_tables(data.data_path, schema.files, ())
        source = TableSource(Path(data.data_path).absolute(), tables, schema, data, schema.schema())
        source = with_flags(source, self._config.tables, data)
        check_stream(source, self._config)
        return source

    def names(self, source: TableSource, extents: Mapping[str, tuple[int, int]]) -> list[str]:
        """Return the names of all partitions."""
        return sorted(extents)

    def growth(
        self,
        source: TableSource,
        extents: Mapping[str, tuple[int, int]],
        known: Mapping[str, FilePosition],
        folder: Path,
    ) -> dict[str, Growth]:
        """Write the messages after the known positions to files in a folder, and return these.

        Raises:
            UserError: when they cannot be read, or the topic is another one than that of the positions.
        """
        notes = [*self.notes]
        if not known:
            self._tell_unread(source)
        growth, begins = self._parts(extents, known)
        ends = {name: part.end.bytes for name, part in growth.items() if begins[name] < part.end.bytes}
        try:
            files = self._files(source, begins, ends, folder)
        except _RemovedError as error:
            lows = {name: low for name, (low, _) in self.ends().items()}
            now = {name: (min(lows.get(name, low), end), end) for name, (low, end) in extents.items()}
            if now == extents:
                raise UserError(str(error)) from None
            self.notes = notes
            for path in folder.iterdir():
                path.unlink()
            return self.growth(source, now, known, folder)
        if extents and not known:
            if not files:
                raise self._without_messages()
            # Imported here: a rank that reads no messages needs no Arrow.
            from recsuite.datasets.tables.formats import columns_of

            tables = dataclasses.replace(source.tables, events=tuple(files.values()))
            validate(source.table_schema, columns_of(tables), schema_path(source.tables.root))
        for name, file in files.items():
            rows = known[name].rows if name in known else 0
            file = dataclasses.replace(file, rows_before=rows, is_more=bool(known))
            growth[name] = growth[name]._replace(file=file)
        return growth

    def _parts(
        self, extents: Mapping[str, tuple[int, int]], known: Mapping[str, FilePosition]
    ) -> tuple[dict[str, Growth], dict[str, int]]:
        """Return the part of each partition to read, without its file, and the offset at which it begins."""
        for name, (_, end) in extents.items():
            if name in known and end < known[name].read_bytes:
                raise UserError(
                    f"{name} of {self.address} ends at offset {end}, and the stream has read its messages "
                    f"before offset {known[name].read_bytes}: it is another topic of this name. Fix: give "
                    "the address of the topic, or train anew with --move_aside instead of --resume."
                )
        # After a resume first again what was read before: the rows that are left end where it ended.
        again = {
            name: Growth(None, begin.rows, FilePosition(bytes=begin.read_bytes, read=begin.read))
            for name, begin in known.items()
            if name in extents and max(begin.bytes, extents[name][0]) < begin.read_bytes
        }
        growth = again or {
            name: Growth(None, known[name].read if name in known else 0, FilePosition(bytes=end), low)
            for name, (low, end) in extents.items()
            if name not in known or end > known[name].bytes
        }
        begins = {}
        for name, part in growth.items():
            low, position = extents[name][0], known.get(name)
            begins[name] = low if position is None else max(low, position.bytes)
            if position is None:
                if known:
                    self.notes.append(f"{name} is new, and is read from offset {low} on")
            elif low > position.bytes:
                offsets = counted(low - position.bytes, "offset")
                self.notes.append(
                    f"{name} begins at offset {low}: the topic removed {offsets} from {position.bytes} on, "
                    "of which those that are not learned are skipped"
                )
                growth[name] = part._replace(rows=None) if again else part
        return growth, begins

    def unread(self, extents: Mapping[str, tuple[int, int]], known: Mapping[str, FilePosition]) -> list[str]:
        """Return the names of the partitions that were not read up to their ends."""
        return [name for name, (_, end) in extents.items() if name not in known or known[name].bytes < end]

    def _tell_unread(self, source: TableSource) -> None:
        """Note the files that would be events without the topic."""
        with contextlib.suppress(UserError):
            tables = find_tables(source.tables.root, source.table_schema.files)
            names = [tables.name_of(file) for file in tables.events]
            listed = printable(", ".join(names[:3])) + ", ..." * (len(names) > 3)
            self.notes.append(f"not read: {listed}; the events are the messages of {self.address}")

    def _files(
        self, source: TableSource, begins: Mapping[str, int], ends: Mapping[str, int], folder: Path
    ) -> dict[str, File]:
        """Write messages to a file for each partition with lines."""
        paths = self._fetch(begins, ends, folder) if ends else {}
        listed = find_tables(source.tables.root, source.table_schema.files, [*paths.values()]).events
        by_path = {file.path: file for file in listed}
        return {
            name: dataclasses.replace(
                by_path[path], label=f"{self.address}/{name} from offset {begins[name]}", encoding="utf-8"
            )
            for name, path in paths.items()
        }

    def _fetch(self, begins: Mapping[str, int], ends: Mapping[str, int], folder: Path) -> dict[str, str]:
        """Write messages to a file of lines for each partition, and return the paths of those with lines.

        ends: of the partitions to read, each behind its begin.
        """
        from confluent_kafka import TopicPartition

        consumer, num_empty, num_read = self._connected(), 0, 0
        following = {number_of(name): begins[name] for name in ends}
        open_ends = {number_of(name): end for name, end in ends.items()}
        number = sum(open_ends.values()) - sum(following.values())
        written: dict[int, Path] = {}
        consumer.assign([TopicPartition(self.name, *partition) for partition in following.items()])
        heard = time.monotonic()
        try:
            with stage(f"reading {self.name}", number, "messages") as reached:
                while open_ends:
                    lines: dict[int, list[bytes]] = {}
                    # To ask for more messages than there are would wait for the rest.
                    most = min(AT_ONCE, sum(end - following[part] for part, end in open_ends.items()))
                    for part, offset, value in self._messages(consumer, open_ends, most):
                        # Lower offsets are messages that the client repeats.
                        if following[part] <= offset < open_ends[part]:
                            following[part] = offset + 1
                            num_empty, num_read = num_empty + (value is None), num_read + 1
                            lines.setdefault(part, []).append(b"" if value is None else lines_of(value))
                        heard = time.monotonic()
                        # Offsets may be missing: those of removed messages and of transactions.
                        if offset + 1 >= open_ends[part]:
                            following[part] = open_ends.pop(part)
                            consumer.incremental_unassign([TopicPartition(self.name, part)])
                    for part, contents in lines.items():
                        if content := b"".join(contents):
                            path = written.setdefault(part, folder / f"{name_of(part)}.jsonl")
                            advice = "give --cache_dir a folder with space"
                            with explained(f"Cannot write {path}", advice), path.open("ab") as file:
                                file.write(content)
                            # The time of a slow disk does not count as time without messages.
                            heard = time.monotonic()
                    reached(num_read)
                    waited = time.monotonic() - heard
                    if open_ends and waited > (ASK_SECONDS if self._is_refused else self._seconds):
                        part = min(open_ends)
                        place = f"{name_of(part)} at offset {following[part]} of {open_ends[part]}"
                        raise self._failed(f"no message has come for {waited:.0f} s, {place}")
        finally:
            consumer.unassign()
        if num_empty:
            self.notes.append(f"skipped {counted(num_empty, 'message')} without a value")
        return {name_of(part): str(path) for part, path in sorted(written.items())}

    def _without_messages(self) -> UserError:
        return UserError(
            f"{self.address} has no message with a value. Fix: start again when there are some, or name "
            "another topic."
        )

    @contextlib.contextmanager
    def _sample(self) -> Iterator[Path]:
        """Yield a folder with the first messages, and links to the tables of users and items."""
        given = Path(self._config.data.data_path).absolute()
        written = schema_path(given)
        sections = given_in(written)[1] if written.exists() else {}
        files = Files(**sections.get("files", {}))
        self._refuse_named(written, files)
        extents = {name: extent for name, extent in self.ends().items() if extent[0] < extent[1]}
        with explained("Cannot make a temporary folder"), tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            (folder / "events").mkdir()
            begins = {name: low for name, (low, _) in extents.items()}
            ends = {name: min(end, low + SAMPLE) for name, (low, end) in extents.items()}
            if not ends or not self._fetch(begins, ends, folder / "events"):
                raise self._without_messages()
            tables = find_tables(given, files, ())
            for file in tables.files:
                path = folder / tables.name_of(file)
                if not path.exists():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.symlink_to(file.path)
            if written.exists():
                (folder / written.name).write_bytes(written.read_bytes())
            yield folder

    def _refuse_named(self, written: Path, files: Files) -> None:
        if files.events:
            raise UserError(
                f"{printable(written)} names the events {printable(files.events)}, and those of --stream "
                f"{self.address} are its messages. Fix: remove the line under [files]."
            )

    def _connected(self) -> Any:
        if self._consumer is None:
            require_installed("--stream kafka://", "confluent_kafka")
            import confluent_kafka

            own = {
                "bootstrap.servers": self.servers,
                # No partition is skipped in silence, and no offset is stored outside of checkpoints.
                "auto.offset.reset": "error",
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "enable.partition.eof": True,
                # What is before the end of a partition is decided then, so all machines read the same.
                "isolation.level": "read_committed",
                "error_cb": self._note,
            }
            given = read_settings()
            if refused := sorted(given.keys() & own.keys()):
                raise UserError(f"{refused[0]} in {SETTINGS} is set by --stream; remove the line.")
            # The group has no member: a client requires its name. Its log would be beside the messages.
            others = {"group.id": "recsuite", "log_level": 0}
            try:
                self._consumer = confluent_kafka.Consumer({**others, **given, **own})
            except confluent_kafka.KafkaException as error:
                raise UserError(f"{SETTINGS} has a wrong setting: {error.args[0].str()}.") from None
            # Raised for settings that require functions of Python.
            except (TypeError, ValueError, AttributeError) as error:
                raise UserError(f"{SETTINGS} has a wrong setting: {printable(str(error))}.") from None
        return self._consumer

    def _note(self, error: Any) -> None:
        """Keep the last error of the connections, which the client repairs by itself if it can."""
        from confluent_kafka import KafkaError

        # That all brokers are down is only a consequence of earlier errors.
        if error.code() != KafkaError._ALL_BROKERS_DOWN or not self._fault:
            self._fault = error.str()
        self._is_refused |= error.code() in (KafkaError._AUTHENTICATION, KafkaError._SSL)

    def _retried(self, ask: Callable[[], T], until: float) -> T:
        """Return the first answer of the brokers; refuse when there is none until a time."""
        from confluent_kafka import KafkaException

        begin, is_said = time.monotonic(), False
        while True:
            try:
                answer = ask()
                # An answer shows that earlier faults are repaired.
                self._fault, self._is_refused = "", False
                return answer
            except KafkaException as error:
                reason = error.args[0].str()
            # Calls `_note`. No partition is assigned, so no message is lost.
            self._consumer.poll(0)
            waited = time.monotonic() - begin
            if self._is_refused or time.monotonic() > until:
                raise self._failed(f"no answer for {waited:.0f} s", reason)
            if waited > SAID_AFTER and not is_said:
                say(f"waiting for an answer of {self.address}: {printable(self._fault or reason)}")
                is_said = True

    def _failed(self, what: str, reason: str = "") -> UserError:
        """Return the error for brokers that do not answer."""
        what = "the brokers refuse this client" if self._is_refused else what
        return UserError(
            f"Cannot read {self.address}: {what} ({printable(self._fault or reason or 'no error')}). Fix: "
            f"check the address, the brokers, and the login in the file that {SETTINGS} names."
        )

    def _partitions(self, consumer: Any) -> list[int]:
        from confluent_kafka import KafkaError, KafkaException

        error = (topic := consumer.list_topics(self.name, timeout=ASK_SECONDS).topics[self.name]).error
        # Brokers that just started may not know it for a moment.
        is_unknown = error is not None and error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART
        if is_unknown and not self._was_asked:
            raise UserError(f"{self.address} does not exist: the brokers have no topic {self.name}.")
        if error is not None:
            # Such as a missing right to read it, or an election of leaders.
            raise KafkaException(error)
        return sorted(topic.partitions)

    def _messages(
        self, consumer: Any, ends: Mapping[int, int], most: int
    ) -> Iterator[tuple[int, int, bytes | None]]:
        """Yield partition, offset and value of the next messages; no value at the end of a partition."""
        from confluent_kafka import KafkaError

        transient = (KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._TIMED_OUT)
        for message in consumer.consume(most, WAIT_SECONDS):
            error, number = message.error(), message.partition()
            if error is None:
                if number in ends:
                    yield number, message.offset(), message.value()
            elif error.code() == KafkaError._PARTITION_EOF:
                # Before the end if a broker does not have all messages yet.
                if number in ends and message.offset() >= ends[number]:
                    yield number, ends[number], None
            elif error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
                raise _RemovedError(
                    f"Cannot read partition {number} of {self.address}: it does not have the messages that "
                    "were asked for. Fix: start again."
                )
            elif error.code() not in transient:
                where = f"partition {number} of " if number >= 0 else ""
                raise UserError(
                    f"Cannot read {where}{self.address}: {printable(error.str())}. Fix: check the topic and "
                    f"the rights of this login, also on the group that group.id names, and start again."
                )


class _RemovedError(UserError):
    """The topic removed messages after it was asked which it has."""


class TopicWatcher:
    """Polling of the end offsets of a topic, see `Watcher`. known: up to which it was read."""

    def __init__(self, topic: Topic) -> None:
        self._topic = topic
        self.known: Mapping[str, tuple[int, int]] = {}

    def has_grown(self) -> bool:
        """True if a partition has another end, or there is another partition. Collective: every rank."""
        extents: dict[str, tuple[int, int]] = broadcast_from_rank0(self._topic.ends)
        before, self.known = self.known, extents
        return _ends_of(before) != _ends_of(extents)

    def on_unreadable(self, error: UserError) -> None:
        """Raise the error: messages do not change."""
        raise error


def _ends_of(extents: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    return {name: end for name, (_, end) in extents.items()}


def lines_of(value: bytes) -> bytes:
    """Return a message as lines of JSON: one for an object, one for each row of Arrow record batches.

    A message that is neither becomes a line with its first characters as a text. A text is no row, so it is
    counted as a bad row.
    """
    if value.startswith(ARROW):
        return _lines_of_arrow(value)
    if len(value) > JSON_BLOCK_BYTES:
        return _bad_line(value)
    is_line = value.startswith(b"{") and not NOT_IN_A_LINE.search(value)
    try:
        text = value.decode()
        if b"\\ud" in value.lower():
            # An escape may be half of a character, which no file can have.
            json.dumps(json.loads(text), ensure_ascii=False).encode()
        if is_line:
            return value + b"\n"
        if isinstance(json.loads(text), dict):
            # Line ends of an object are between its parts: in a text they would be escaped.
            return re.sub(r"[\r\n]+", " ", text.strip()).encode() + b"\n"
    except (ValueError, RecursionError):
        pass
    return _bad_line(value)


def _bad_line(value: bytes) -> bytes:
    return json.dumps(value[:SHOWN].decode(errors="backslashreplace")).encode() + b"\n"


def _lines_of_arrow(value: bytes) -> bytes:
    import pyarrow

    try:
        table = pyarrow.ipc.open_stream(value).read_all()
        # Otherwise wrong offsets of texts would read foreign memory.
        table.validate(full=True)
        rows = table.to_pylist()
    # Texts that are not UTF-8, and times that Python does not have, are errors of other kinds.
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, KeyError):
        return _bad_line(value)
    # One encoder for all rows: `json.dumps` would make one for each.
    encode = json.JSONEncoder(default=_as_text).encode
    # A NaN is a missing value, and JSON has none.
    objects = ({name: None if entry != entry else entry for name, entry in row.items()} for row in rows)
    lines = [f"{encode(row)}\n".encode() for row in objects]
    return b"".join(line if len(line) <= JSON_BLOCK_BYTES else _bad_line(line) for line in lines)


def _as_text(value: Any) -> str:
    """Return a value that JSON lacks: bytes, a time in ISO form, or a decimal number."""
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)


def is_setting(name: str, mark: str, value: str) -> bool:
    """Return True for the parts of a `key=value`. A key that is none may hold a secret, and is not shown."""
    return bool(mark and value.strip()) and re.fullmatch(r"[a-z0-9._]+", name.strip()) is not None


def read_settings() -> dict[str, str]:
    """Return the settings of the file that KAFKA_CONFIG names, a `key=value` on each line; empty without one.

    Raises:
        UserError: without the values, which may be secrets.
    """
    path = os.environ.get(SETTINGS)
    if not path:
        return {}
    with explained(f"Cannot read {printable(path)}, which {SETTINGS} names"):
        lines = [line.strip() for line in Path(path).read_text(errors="replace").splitlines()]
    pairs = {number: line.partition("=") for number, line in enumerate(lines, 1) if line and line[0] != "#"}
    wrong = [number for number, setting in pairs.items() if not is_setting(*setting)]
    if wrong:
        raise UserError(f"{printable(path)}, line {wrong[0]}: must be key=value, as for librdkafka.")
    return {name.strip(): value.strip() for name, _, value in pairs.values()}
