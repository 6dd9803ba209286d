"""Messages of a Kafka topic, copied into files of JSON lines that a stream follows like all files that grow.

Partitions are assigned by number, without a consumer group, and up to given end offsets. So each machine has
the same files. What a training has learned of them is in its checkpoint, as for all files. A record beside
the files has their sizes and the next offsets. It is replaced in one step after each append, and what a
killed process wrote after the record is cut off.
"""

from __future__ import annotations

import functools
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from recsuite.config.config import Config
from recsuite.datasets.streams import COPY, StreamPosition
from recsuite.datasets.tables.files import JSON_BLOCK_BYTES
from recsuite.errors import UserError, counted, printable
from recsuite.files import explained, flush, locked, plain, replacing, typed
from recsuite.hooks import require_installed
from recsuite.runtime.console import say, stage
from recsuite.runtime.process import RuntimeContext, broadcast_from_rank0, once_per_node

# In the folder of the copy, and hidden from readers of tables.
RECORD = ".topic.json"
# Offsets in a file. A file that is complete is parsed once, and the last one again each time that it grows.
# The limits are multiples of it: another copy of the topic must have the same files.
OFFSETS_IN_FILE = 2**18
FILE = re.compile(r"partition-(\d{5})-(\d{20})\.jsonl")
# Variable with the path of settings of librdkafka, such as for TLS and a login: no secret in a command line.
SETTINGS = "KAFKA_CONFIG"
# Most messages of one request, and the seconds to wait for them.
AT_ONCE, WAIT_SECONDS = 10_000, 0.2
# Seconds between two replacements of the record, of one request, and of the first contact with a broker.
SAVE_SECONDS, ASK_SECONDS, FIRST_SECONDS = 5.0, 2.0, 30.0
# Seconds of waiting after which the reason is shown.
SAID_AFTER = 10.0
# A copy takes as long as a topic is large. It ends with an error when no message comes for half of --timeout.
COPY_DEADLINE = 4 * 3600.0
# Characters of an unreadable message that are kept.
SHOWN = 200
# Start of an Arrow stream.
ARROW = b"\xff\xff\xff\xff"
NOT_IN_A_LINE = re.compile(rb"[\n\r\0]")

T = TypeVar("T")


@dataclass
class CopyRecord:
    """State of a copy. first, next: for each partition, the first offset and the next one to copy. files:
    for each file its size in bytes.
    """

    topic: str
    first: dict[str, int] = field(default_factory=dict)
    next: dict[str, int] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)


class Topic:
    """Kafka topic of a stream, and its copy on this machine. Connects when it is first asked. Not collective.

    config: its --stream names the topic; the copy is in its --data_path. Call `close` at the end.
    """

    def __init__(self, config: Config) -> None:
        self.address = config.stream.topic
        self.servers, self.name = self.address.removeprefix("kafka://").split("/")
        self.folder = Path(config.data.data_path) / COPY
        # End offsets up to which the copy was last made.
        self.ends: dict[int, int] = {}
        # Below --timeout, so that the reason is reported before other ranks give up waiting for this one.
        self._seconds = config.runtime.timeout / 2
        self._consumer: Any = None
        self._fault, self._is_refused = "", False

    def close(self) -> None:
        """Close the connections to the brokers."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def offsets(self) -> dict[int, tuple[int, int]]:
        """Return the first retained offset and the end offset of each partition.

        Raises:
            UserError: when no broker answers, the login is refused, or there is no such topic.
        """
        consumer, seconds = self._connected(), self._seconds
        from confluent_kafka import TopicPartition

        if not self.ends:
            seconds = min(seconds, FIRST_SECONDS)
        # Of all requests together: other ranks wait for the answers.
        until = time.monotonic() + seconds
        partitions = self._retried(lambda: self._partitions(consumer), until)
        ask = functools.partial(consumer.get_watermark_offsets, timeout=ASK_SECONDS)
        return {
            number: self._retried(functools.partial(ask, TopicPartition(self.name, number)), until)
            for number in partitions
        }

    def copy(self, offsets: Mapping[int, tuple[int, int]]) -> list[str]:
        """Append the messages up to the end offsets to the files, and return notes on what was skipped.

        offsets: see `offsets`. One process of a machine calls it; others on the same folder wait.

        Raises:
            UserError: when messages cannot be read or stored, or the copy is of another topic.
        """
        advice = "make room there, or give another --data_path"
        with explained(f"Cannot copy {self.address} to {self.folder}", advice):
            self.folder.mkdir(exist_ok=True)
            with locked(self.folder / ".lock", f"copying {self.address} to {self.folder}", COPY_DEADLINE):
                record = self._recovered()
                if not record.next:
                    say(f"copying {self.address} to {self.folder}")
                notes, ends = self._begun(record, offsets)
                self._save(record, ())
                if ends:
                    number = sum(end - record.next[str(number)] for number, end in ends.items())
                    with stage(f"copying {self.name}", number, "messages") as reached:
                        notes += self._append_until(record, ends, reached)
        if not record.files:
            raise UserError(
                f"{self.address} has no message with a value. Fix: start again when there are some, or name "
                "another topic."
            )
        return notes

    def check_retained(self, position: StreamPosition, ends: Mapping[str, int]) -> None:
        """Refuse a new copy of a topic that has removed learned messages.

        position: of the stream in the files; ends: sizes of the files of the copy, in bytes.

        Raises:
            UserError: with the offsets.
        """
        first = self._record().first
        for path, learned in position.files.items():
            name = FILE.fullmatch(path.removeprefix(f"{COPY}/"))
            begin = first.get(str(int(name[1])), 0) if name else 0
            if name and begin > int(name[2]) and ends.get(path, 0) < learned.bytes:
                raise UserError(
                    f"The stream has learned messages of partition {int(name[1])} of {self.address} before "
                    f"offset {begin}, and {self.folder} does not have them: the topic retains none before "
                    f"offset {begin}. Fix: put the earlier {self.folder} back, or train anew without "
                    "--resume."
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
        if is_unknown and not self.ends:
            raise UserError(f"{self.address} does not exist: the brokers have no topic {self.name}.")
        if error is not None:
            # Such as a missing right to read it, or an election of leaders.
            raise KafkaException(error)
        return sorted(topic.partitions)

    def _record(self) -> CopyRecord:
        path = self.folder / RECORD
        if not path.exists():
            return CopyRecord(self.name)
        try:
            return typed(CopyRecord, json.loads(path.read_bytes()))
        except (ValueError, TypeError) as error:
            raise UserError(
                f"{path} is damaged: {printable(str(error))}. Fix: remove {self.folder}, and the topic is "
                "copied again."
            ) from None

    def _recovered(self) -> CopyRecord:
        """Return the record, and cut off what a killed process wrote after it."""
        record = self._record()
        if record.topic != self.name:
            raise UserError(
                f"{self.folder} has the messages of the topic {printable(record.topic)}; give another "
                f"--data_path for {self.name}."
            )
        is_copy = (self.folder / RECORD).exists()
        for path in self.folder.iterdir():
            if path.name.startswith("."):
                continue
            if not is_copy or not FILE.fullmatch(path.name):
                raise UserError(
                    f"{path} is not of a copy of {self.address}, which needs this folder for itself. Fix: "
                    "move the file, or give another --data_path."
                )
            if path.name not in record.files:
                path.unlink()
            elif path.stat().st_size > record.files[path.name]:
                os.truncate(path, record.files[path.name])
        for name, size in record.files.items():
            path = self.folder / name
            if not path.exists() or path.stat().st_size < size:
                raise UserError(
                    f"{path} is not as it was written. Fix: put it back, or remove {self.folder}, and the "
                    "topic is copied again."
                )
        return record

    def _begun(
        self, record: CopyRecord, offsets: Mapping[int, tuple[int, int]]
    ) -> tuple[list[str], dict[int, int]]:
        """Return notes on removed messages, and the end offset of each partition with messages to copy."""
        notes, ends = [], {}
        for number, (low, end) in offsets.items():
            record.first.setdefault(str(number), low)
            begin = record.next.setdefault(str(number), low)
            # Another training may have copied more into this folder since the ends were asked.
            if begin > end and begin > self.offsets()[number][1]:
                raise UserError(
                    f"Partition {number} of {self.address} ends at offset {end}, and {self.folder} has its "
                    f"messages before offset {begin}: it is another topic of this name. Fix: give another "
                    "--data_path, and train anew."
                )
            if begin < low:
                notes.append(
                    f"the offsets {begin} to {low - 1} of partition {number} of {self.address} are skipped, "
                    "because the topic removed them before they were copied"
                )
                record.next[str(number)] = begin = low
            if begin < end:
                ends[number] = end
        return notes, ends

    def _append_until(
        self, record: CopyRecord, ends: dict[int, int], reached: Callable[[int], None]
    ) -> list[str]:
        """Append the messages before the end offsets, and return a note on those without a value."""
        from confluent_kafka import TopicPartition

        consumer, num_empty, num_read, unflushed = self._connected(), 0, 0, set[str]()
        consumer.assign([TopicPartition(self.name, number, record.next[str(number)]) for number in ends])
        saved = heard = time.monotonic()
        try:
            while ends:
                lines: dict[str, list[bytes]] = {}
                # A request for more messages than there are would wait for the rest.
                most = min(AT_ONCE, sum(end - record.next[str(number)] for number, end in ends.items()))
                for number, offset, value in self._messages(consumer, ends, most):
                    # Lower offsets are messages that the client repeats.
                    if record.next[str(number)] <= offset < ends[number]:
                        record.next[str(number)] = offset + 1
                        num_empty, num_read = num_empty + (value is None), num_read + 1
                        content = b"" if value is None else lines_of(value)
                        lines.setdefault(file_of(number, offset), []).append(content)
                    heard = time.monotonic()
                    # Offsets may be missing: those of removed messages and of marks of transactions.
                    if offset + 1 >= ends[number]:
                        record.next[str(number)] = ends.pop(number)
                        consumer.incremental_unassign([TopicPartition(self.name, number)])
                for name, contents in lines.items():
                    if content := b"".join(contents):
                        with (self.folder / name).open("ab") as file:
                            file.write(content)
                        # The time of a slow disk does not count as time without messages.
                        heard = time.monotonic()
                        record.files[name] = record.files.get(name, 0) + len(content)
                        unflushed.add(name)
                reached(num_read)
                now = time.monotonic()
                waited = now - heard
                if ends and waited > (ASK_SECONDS if self._is_refused else self._seconds):
                    number = min(ends)
                    position = f"partition {number} at offset {record.next[str(number)]} of {ends[number]}"
                    raise self._failed(f"no message has come for {now - heard:.0f} s, {position}")
                if not ends or now - saved > SAVE_SECONDS:
                    self._save(record, unflushed)
                    saved = now
                    unflushed.clear()
        finally:
            consumer.unassign()
        empty = counted(num_empty, "message")
        return [f"skipped {empty} without a value of {self.address}"] if num_empty else []

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
            elif error.code() not in transient:
                where = f"partition {number} of " if number >= 0 else ""
                raise UserError(
                    f"Cannot read {where}{self.address}: {printable(error.str())}. Fix: check the topic and "
                    f"the rights of this login, also on the group that group.id names, and start again."
                )

    def _save(self, record: CopyRecord, unflushed: set[str] | tuple[()]) -> None:
        """Replace the record, after the files are on the disk."""
        for name in unflushed:
            flush(self.folder / name)
        # Otherwise a power cut could remove the names of files whose bytes are on the disk.
        flush(self.folder)
        with replacing(self.folder / RECORD) as aside:
            aside.write_text(json.dumps(plain(record)))
            flush(aside)


def file_of(partition: int, offset: int) -> str:
    """Name of the file for a message. The order of names is that of partition and offset."""
    return f"partition-{partition:05d}-{offset // OFFSETS_IN_FILE * OFFSETS_IN_FILE:020d}.jsonl"


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


def copy_topic(topic: Topic, context: RuntimeContext) -> None:
    """Copy new messages of a topic to every machine, up to the same end offsets. Collective: every rank.

    Raises:
        UserError: see `Topic.offsets` and `Topic.copy`.
    """
    offsets: dict[int, tuple[int, int]] = broadcast_from_rank0(topic.offsets)
    ends = {number: end for number, (_, end) in offsets.items()}
    if ends == topic.ends:
        return
    work, fix = f"copy the messages of {topic.address}", "start again, and it continues where it was"
    notes = once_per_node(context, lambda: topic.copy(offsets), COPY_DEADLINE, work, fix)[0]
    topic.ends = ends
    for note in notes:
        context.say(note)
