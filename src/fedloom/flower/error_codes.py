"""What a site says when it cannot answer: a number. The text of an error stays at the site, in its own log."""

from __future__ import annotations

from enum import IntEnum


class Code(IntEnum):
    """Why there is no answer."""

    OK = 0
    MALFORMED = 10
    PLAN = 11
    DATA = 12
    STATE = 13
    UNDECLARED = 14
    NOT_FINITE = 15
    FAILED = 16
    UNKNOWN_JOB = 17


WORDS = {
    Code.MALFORMED: "could not read the message; it may run another version of fedloom",
    Code.PLAN: "did not accept the experiment; its administrator finds the reason in the site's log",
    Code.DATA: "could not read its data; its administrator finds the reason in the site's log",
    Code.STATE: "no longer has the state of its last accepted round; it begins anew",
    Code.UNDECLARED: "was about to send a tensor that the method does not declare, and did not",
    Code.NOT_FINITE: "its own leaves are not finite",
    Code.FAILED: "failed while it worked; its administrator finds the reason in the site's log",
    Code.UNKNOWN_JOB: "was asked for a program that it does not know",
}


def words(code: int) -> str:
    """A code in words.

    Example:
        >>> words(15)
        'its own leaves are not finite'
    """
    try:
        return WORDS[Code(code)]
    except (KeyError, ValueError):
        return f"sent the unknown code {code}"


class Refusal(Exception):
    """Ends a site's work on a job; only the code leaves the site.

    Args:
        code: what is sent.
        reason: what is written to the site's own log.
    """

    def __init__(self, code: Code, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason
