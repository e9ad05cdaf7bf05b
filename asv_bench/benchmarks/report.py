"""What the report of a fit costs, and the model that is fitted to it."""

from daskps import FitReport, SpeedupModel
from daskps.report import RankEpoch


class Report:
    """Of 100 epochs on 4 ranks."""

    def setup(self):
        self.entries = [
            RankEpoch(epoch, rank, 3200, 400, 401, 4.0, 0.25, 0.25, 2**30, "shared-memory")
            for epoch in range(100)
            for rank in range(4)
        ]
        self.report = FitReport(4, "batch", 32, {"lease": 0.1}, [4.6] * 100, self.entries)

    def time_text(self):
        str(self.report)

    def time_html(self):
        self.report._repr_html_()

    def time_to_dict(self):
        self.report.to_dict()

    def time_model(self):
        SpeedupModel.from_report(self.report)
