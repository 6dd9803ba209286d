"""How a process ends when something went wrong: who speaks, and what torchrun shows last.

torchrun ends all ranks as soon as one has exited, and its report ends with the rank that left the oldest
error file. So a rank that only suffers from another's failure holds still before it speaks or exits.
"""

from __future__ import annotations

import sys
import time
import traceback

from recsuite.errors import LINES, BrokenLaunchError, LostPeerError, UserError, harmless, signed
from recsuite.runtime.ending.recovery import Recovery
from recsuite.runtime.launch import read_launch
from recsuite.runtime.peers.error_file import leave_for_torchrun
from recsuite.runtime.peers.heartbeat import in_silence
from recsuite.runtime.peers.rollcall import ALL_ANSWER
from recsuite.runtime.process import lost_peers

# A rank may say the same as the first one of its machine some seconds later than it.
SAME_MISTAKE_SECONDS = 5.0
# Between the exit of a rank and torchrun's signal to the others lie some tenths of a second, on a busy one
# a second or two. No longer: on other machines this is added to what --timeout and torchrun take.
LOST_PEER_SECONDS = 4.0
# Of torch's exceptions, which are RuntimeErrors otherwise.
LOST_PEER_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError")
LOST_PEER_WORDS = ("gloo/transport", "Application timeout caused pair closure")


def report_mistake(sentence: str) -> None:
    """Say a user's mistake, once for all ranks of a machine that find it, and leave it for torchrun's own
    report.

    The first rank of a machine speaks at once. Another rank speaks only if it is still alive some seconds
    later: then the mistake was its own.
    """
    # Before the wait, in which torchrun may end this rank.
    leave_for_torchrun(sentence, sentence)
    try:
        local_rank = read_launch().local_rank
    except UserError:
        # The mistake may be in the environment itself.
        local_rank = 0
    if local_rank != 0:
        time.sleep(SAME_MISTAKE_SECONDS)
    print(signed(sentence), file=sys.stderr, flush=True)


def report_lost_worker(screen: str) -> None:
    """Show what became of a data worker, on the rank that it belonged to; no traceback could say more."""
    leave_for_torchrun(screen, screen)
    print(harmless(screen, LINES), file=sys.stderr, flush=True)


def name_lost_peers(error: Exception, timeout: float, recovery: Recovery) -> None:
    """Find out, where an exception says only that another rank went away, which one, on which machine, and
    how to continue.

    Raises:
        BrokenLaunchError: with that, from the exception.
        LostPeerError: when all others are there, so that one of them may wait by mistake.
    """
    if not is_lost_peer(error):
        return
    fault = "" if isinstance(error, BrokenLaunchError) else lost_peers()
    # Nobody is lost, so no sentence can explain it: the traceback shows where this rank waited.
    if fault == ALL_ANSWER:
        raise LostPeerError(fault) from error
    if fault:
        fault = in_silence(fault, timeout) if _is_silence(error) else fault
    elif isinstance(error, LostPeerError):
        fault = str(error)
    else:
        return
    raise BrokenLaunchError(f"{fault}. {recovery.after_lost_peer()}") from error


def report_broken_launch(error: BrokenLaunchError) -> None:
    """Say which ranks are lost, once for all ranks of this machine, and leave it for the launcher.

    As with a mistake, a rank that is not the first of its machine speaks only if nobody has ended it.
    """
    if not _is_silence(error):
        time.sleep(LOST_PEER_SECONDS)
    if read_launch().local_rank != 0:
        time.sleep(SAME_MISTAKE_SECONDS)
    print(signed(error), file=sys.stderr, flush=True)
    # After it, so that nothing is marked as said that was not.
    leave_for_torchrun(str(error), str(error), is_said=True)


def record_crash(error: BaseException) -> None:
    """Leave the traceback of an exception for torchrun's report, and let it pass on."""
    if is_lost_peer(error) and not _is_silence(error):
        time.sleep(LOST_PEER_SECONDS)
    leave_for_torchrun(f"{type(error).__name__}: {error}", traceback.format_exc())


def is_lost_peer(error: BaseException) -> bool:
    """Whether an exception says only that another rank went away, or is silent."""
    if isinstance(error, LostPeerError) or type(error).__name__ in LOST_PEER_TYPES:
        return True
    return any(words in str(error) for words in LOST_PEER_WORDS)


def _is_silence(error: BaseException) -> bool:
    """Whether a peer is silent, and not gone: it has left nothing to be read first, and --timeout is over."""
    # The first exception has the library's words; what was made of it may have others.
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).lower()
    return "timed out" in text or "timeout" in text
