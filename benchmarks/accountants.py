"""Epsilon of the same rounds by each accountant of dp-accounting, and as halfmoon counts it.

    python benchmarks/accountants.py

"Renyi" is what everything was counted by before: RdpAccountant, for cohorts of k of n drawn without replacement.
"PLD" is PLDAccountant where it knows the sampling: whole cohorts. "PLD, Poisson" is another sampling, k / n for each
client, for comparison alone: halfmoon draws no such cohorts, and its epsilon is not that of theirs.
"""

from dp_accounting import NeighboringRelation, dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from halfmoon.aggregation.privacy.accounting import ORDERS, compute_planned_epsilon

DELTA = 1e-5
REPLACED = NeighboringRelation.REPLACE_ONE
PLANS = ((10, 10, 8.0), (20, 20, 20.0), (100, 1000, 4.0), (100, 1000, 8.0), (40, 200, 8.0), (5, 20, 8.0))
"""Cohort, clients and noise."""
ROUNDS = (1, 10, 40, 200)


def main() -> None:
    """Print the table."""
    print("| cohort | noise | rounds | Renyi (before) | PLD | halfmoon (now) | PLD, Poisson |")
    print("| --- " * 7 + "|")
    for cohort, clients, noise in PLANS:
        for rounds in ROUNDS:
            # Neighbors that replace a client move a sum by 2 C. The PLD accountant does that by itself where it samples
            # (it takes C as the sensitivity of adding or removing), and not where it does not: there z / 2 says it.
            plain = dp_event.GaussianDpEvent(noise / 2)
            event, exact, poisson = plain, "-", "-"
            if cohort == clients:
                exact = f"{PLDAccountant().compose(plain, rounds).get_epsilon(DELTA):.3f}"
            else:
                event = dp_event.SampledWithoutReplacementDpEvent(clients, cohort, plain)
                coin = dp_event.PoissonSampledDpEvent(cohort / clients, dp_event.GaussianDpEvent(noise))
                poisson = f"{PLDAccountant(REPLACED).compose(coin, rounds).get_epsilon(DELTA):.3f}"
            before = RdpAccountant(ORDERS, REPLACED).compose(event, rounds).get_epsilon(DELTA)
            now = compute_planned_epsilon(cohort, clients, rounds, noise, DELTA)
            plan = f"| {cohort} of {clients:,} | {noise:g} | {rounds} "
            print(f"{plan}| {before:.3f} | {exact} | {now:.3f} | {poisson} |")


if __name__ == "__main__":
    main()
