"""From the diary to what would be lost now: what is saved on this machine, what is on the Hub, and why not. Pure, as the view."""

from __future__ import annotations

from colabtrain.dashboard.fields import clock, number, one_line, whole
from colabtrain.runtime.diary import Event

HUB_EVENTS = ("hub_claimed", "checkpoint_published", "hub_error", "publish_skipped", "fenced", "not_published")


class Safety:
    """Folds events one by one. Steps are None where nothing is saved or published."""

    def __init__(self) -> None:
        self.saved_step: int | None = None
        self.not_saved = ""  # why the newest checkpoint failed, until one succeeds
        self._step = 0  # the newest step, and its time
        self._step_time: float | None = None
        self._new_process()

    def feed(self, event: Event) -> None:
        kind = event.get("event")
        if kind in HUB_EVENTS:
            self._take_hub_event(event)
        elif kind == "step":
            self._take_step(event)
        elif kind in ("run_started", "adopted"):
            self._new_process()
        elif kind == "resumed":
            self._go_on(event)
        elif kind == "checkpoint_saved":
            self.saved_step, self.not_saved = whole(event.get("step")), ""
        elif kind in ("checkpoint_failed", "checkpoint_late"):
            self.not_saved = one_line(event.get("text"))

    def facts(self) -> list[str]:
        """For the head line, as plain text."""
        facts = [] if self.saved_step is None else [f"saved at step {self.saved_step:,}"]
        if not self._uses_hub:
            return facts
        facts.append("nothing on the Hub yet" if self.published_step is None else f"on the Hub: step {self.published_step:,}")
        if (seconds := self.seconds_at_risk()) is not None:
            facts.append("nothing at risk" if self._is_published() else f"at risk: {_rounded(seconds)}")
        return facts

    def notes(self) -> list[str]:
        """What has gone wrong and still is."""
        return [note for note in (self.not_saved, self._fenced or self._not_published) if note]

    def seconds_at_risk(self) -> float | None:
        """How much training would be lost with this machine; None where that is not known or there is no hub."""
        if not self._uses_hub or not self._step:
            return None
        if self._is_published():
            return 0.0
        since = self._first_time if self._captured is None else self._captured
        return None if since is None or self._step_time is None else max(0.0, self._step_time - since)

    def _new_process(self) -> None:
        """An earlier one may have failed, on another machine; what it published is told by the claim of this one."""
        self.not_saved = self._not_published = self._fenced = ""
        self._uses_hub = False
        self.published_step: int | None = None
        self._captured: float | None = None  # when the published state was, in epoch seconds
        self._first_time: float | None = None  # of the first step of this process

    def _take_hub_event(self, event: Event) -> None:
        self._uses_hub, kind = True, event["event"]
        if kind == "hub_claimed":
            self.published_step, self._captured = whole(event.get("published_step")) or None, None
        elif kind == "checkpoint_published":
            self.published_step, self._captured, self._not_published = whole(event.get("step")), number(event.get("saved_at")), ""
        elif kind == "hub_error":
            self._not_published = _why(event)
        elif kind == "not_published":
            self._not_published = one_line(event.get("text"))
        elif kind == "fenced":
            self._fenced = one_line(event.get("text")) or "another process publishes to this repo now; this one does not any more"

    def _take_step(self, event: Event) -> None:
        if (step := whole(event.get("step"))) is None:
            return
        if step <= self._step:  # made anew without a word
            self._cut(step - 1)
        self._step, self._step_time = step, number(event.get("time"))
        if self._first_time is None:
            self._first_time = self._step_time

    def _go_on(self, event: Event) -> None:
        self._cut(whole(event.get("step")) or 0)
        if self._is_published():
            self._captured = number(event.get("time"))  # nothing was made in the meantime, so nothing of it is at risk

    def _cut(self, step: int) -> None:
        """What lies beyond `step` is not part of this model."""
        self._step = min(self._step, step)
        if self.saved_step is not None:
            self.saved_step = min(self.saved_step, step) or None
        if self.published_step is not None and self.published_step > step:
            self.published_step, self._captured = step or None, None

    def _is_published(self) -> bool:
        return self.published_step is not None and self.published_step >= self._step


def _why(event: Event) -> str:
    reason = one_line(event.get("reason"))
    text = f"publishing fails: {reason}" if reason else one_line(event.get("text")) or "publishing fails"
    again = clock(number(event.get("retry_at")))
    return f"{text.rstrip('.')}. Next try at {again}." if again else text


def _rounded(seconds: float) -> str:
    """`42 s`, `3 min` or `2 h 07 min`."""
    if seconds < 59.5:
        return f"{max(1, round(seconds))} s"
    minutes = max(1, round(seconds / 60))
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
