"""Reports on training runs: one self-contained HTML page that shows how well a policy learned to adapt."""

from maml_rl.report.writing import write_report

__all__ = ["write_report"]
