"""What speculation gained: every rate derives from one histogram of rounds."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol


class Round(Protocol):
    """A step of the loop, with or without text."""

    @property
    def tokens(self) -> tuple[int, ...]: ...
    @property
    def accepted(self) -> int: ...
    @property
    def drafted(self) -> int: ...


@dataclass
class SpecStats:
    """Rounds counted by (drafted, accepted), and the tokens they committed.

    A round is one pass of the target, drafted for or not. `tokens` is not rounds + accepted:
    a round that ends inside its draft has no token of the target's own.
    """

    histogram: Counter[tuple[int, int]] = field(default_factory=Counter)
    tokens: int = 0

    def add(self, step: Round) -> None:
        """Count one step; one without tokens (cancelled) is no round."""
        if step.tokens:
            self.histogram[step.drafted, step.accepted] += 1
            self.tokens += len(step.tokens)

    def merge(self, other: "SpecStats") -> None:
        """Add the rounds of `other`."""
        self.histogram.update(other.histogram)
        self.tokens += other.tokens

    @property
    def rounds(self) -> int:
        """Passes of the target."""
        return self.histogram.total()

    @property
    def drafted(self) -> int:
        """Drafted tokens that the target judged."""
        return sum(drafted * n for (drafted, _), n in self.histogram.items())

    @property
    def accepted(self) -> int:
        """Drafted tokens that were committed."""
        return sum(accepted * n for (_, accepted), n in self.histogram.items())

    @property
    def acceptance_rate(self) -> float:
        """accepted / drafted; 0 when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / rounds: tokens per pass of the target; 0 without rounds."""
        return 1 + self.accepted / self.rounds if self.rounds else 0.0

    @property
    def position_rates(self) -> list[float]:
        """Share of all rounds that accepted draft position i; the shares sum to accepted / rounds."""
        longest = max((drafted for drafted, _ in self.histogram), default=0)
        return [sum(n for (_, accepted), n in self.histogram.items() if accepted > i) / self.rounds for i in range(longest)]

    @property
    def accepted_histogram(self) -> dict[int, int]:
        """Rounds by the number of drafted tokens they accepted."""
        counts: Counter[int] = Counter()
        for (_, accepted), n in self.histogram.items():
            counts[accepted] += n
        return dict(sorted(counts.items()))

    def to_dict(self) -> dict[str, Any]:
        """Everything a report prints; rates never come without the counts behind them."""
        return {
            "rounds": self.rounds,
            "tokens": self.tokens,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_rate": self.acceptance_rate,
            "acceptance_length": self.acceptance_length,
            "position_rates": self.position_rates,
            "accepted_histogram": self.accepted_histogram,
        }
