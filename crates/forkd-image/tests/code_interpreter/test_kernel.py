"""What the Python kernel adds: charts of figures, values of tables, variables. Needs matplotlib and pandas."""

import importlib.util
import json
import os
import pathlib
import random
import sys
import unittest

SOURCE = pathlib.Path(__file__).parents[2] / "src" / "code_interpreter"
sys.path.insert(0, str(SOURCE))

from forkd_code_interpreter import charts, kernel  # noqa: E402

has_libraries = all(importlib.util.find_spec(name) for name in ("matplotlib", "pandas", "numpy"))


class VariablesTest(unittest.TestCase):
    def test_variables_of_an_execution_are_set_back(self):
        os.environ["FORKD_TEST_A"] = "before"
        os.environ.pop("FORKD_TEST_B", None)
        kernel.enter({"FORKD_TEST_A": "1", "FORKD_TEST_B": "2"})
        self.assertEqual((os.environ["FORKD_TEST_A"], os.environ["FORKD_TEST_B"]), ("1", "2"))
        kernel.leave()
        self.assertEqual(os.environ.pop("FORKD_TEST_A"), "before")
        self.assertNotIn("FORKD_TEST_B", os.environ)

    def test_a_fork_reseeds_what_belongs_to_the_module_and_not_what_has_a_seed(self):
        own = random.Random(42)
        state = random.getstate()
        kernel.forked({"FORKD_TEST_C": "3"})
        self.assertEqual(os.environ.pop("FORKD_TEST_C"), "3")
        self.assertNotEqual(random.getstate(), state)
        self.assertEqual(own.random(), random.Random(42).random())


@unittest.skipUnless(has_libraries, "NOT RUN: charts and tables need matplotlib and pandas")
class ChartsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        import matplotlib

        matplotlib.use("agg")
        charts.watch_boxes()

    def setUp(self):
        import matplotlib.pyplot

        self.plot = matplotlib.pyplot
        self.figure, self.axes = self.plot.subplots()
        self.addCleanup(self.plot.close, "all")

    def chart(self):
        chart = charts.of_figure(self.plot.gcf())
        json.dumps(chart, allow_nan=False)
        return chart

    def test_a_line(self):
        self.axes.plot([1, 2, float("nan")], [3, 4, 5], label="L")
        self.axes.axhline(2)
        self.axes.set(title="T", xlabel="Time (s)", ylabel="Y", yscale="log")
        chart = self.chart()
        self.assertEqual((chart["type"], chart["title"], chart["x_unit"], chart["y_unit"]), ("line", "T", "s", None))
        self.assertEqual(chart["elements"], [{"label": "L", "points": [[1, 3], [2, 4], [None, 5]]}])
        self.assertEqual((chart["x_scale"], chart["y_scale"]), ("linear", "log"))
        self.assertEqual(len(chart["x_ticks"]), len(chart["x_tick_labels"]))

    def test_a_line_over_categories_and_dates(self):
        import datetime

        self.axes.plot(["a", "b"], [datetime.date(2024, 1, 1), datetime.date(2024, 1, 3)])
        chart = self.chart()
        self.assertEqual((chart["x_scale"], chart["y_scale"]), ("categorical", "datetime"))
        self.assertEqual(chart["elements"][0]["points"][1], ["b", "2024-01-03T00:00:00"])

    def test_points(self):
        self.axes.scatter([1, 2], [3, 4], label="S")
        chart = self.chart()
        self.assertEqual((chart["type"], chart["elements"][0]["points"]), ("scatter", [[1, 3], [2, 4]]))

    def test_bars(self):
        self.axes.bar(["a", "b"], [1, 2], label="G")
        expected = [{"label": "a", "group": "G", "value": 1}, {"label": "b", "group": "G", "value": 2}]
        self.assertEqual((self.chart()["type"], self.chart()["elements"]), ("bar", expected))
        self.axes.clear()
        self.axes.barh(["a", "b"], [1, 2], label="G")
        self.assertEqual(self.chart()["elements"], expected)

    def test_a_pie(self):
        self.axes.pie([1, 3], labels=["a", "b"])
        angles = [(part["label"], round(part["angle"]), part["radius"]) for part in self.chart()["elements"]]
        self.assertEqual(angles, [("a", 90, 1), ("b", 270, 1)])

    def test_boxes(self):
        self.axes.boxplot([[1, 2, 3, 4, 20]])
        self.axes.set_xticklabels(["p"])
        box = self.chart()["elements"][0]
        self.assertEqual(
            box,
            {"label": "p", "min": 1, "first_quartile": 2, "median": 3, "third_quartile": 4, "max": 4, "outliers": [20]},
        )

    def test_several_charts(self):
        self.plot.close("all")
        figure, axes = self.plot.subplots(1, 2)
        axes[0].plot([1, 2])
        axes[1].bar(["a"], [1])
        figure.suptitle("S")
        chart = self.chart()
        self.assertEqual((chart["type"], chart["title"]), ("superchart", "S"))
        self.assertEqual([part["type"] for part in chart["elements"]], ["line", "bar"])

    def test_what_is_no_chart_and_what_is_too_large(self):
        self.axes.imshow([[1, 2]])
        self.assertEqual(self.chart()["type"], "unknown")
        self.axes.plot(range(charts.MAX_POINTS + 1))
        self.assertIsNone(self.chart())

    def test_a_table(self):
        import pandas

        frame = pandas.DataFrame({
            "a": [1.5, None], 1: pandas.to_datetime(["2024-01-01", None]), "c": ["x", None], "d": [True, False],
        })  # fmt: skip
        values = kernel.table(frame)
        json.dumps(values, allow_nan=False)
        self.assertEqual(values, {
            "a": [1.5, None], "1": ["2024-01-01T00:00:00", None], "c": ["x", None], "d": [True, False],
        })  # fmt: skip


if __name__ == "__main__":
    unittest.main()
