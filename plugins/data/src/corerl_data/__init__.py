"""Rows of data files and directories, read by the library `datasets`."""

from corerl.plugin import FormatSpec

SPEC = FormatSpec(
    implementation="corerl_data.rows:open_rows",
    api=(2, 0),
    summary="parquet, csv, arrow and JSON files, data sets with splits, rows that change on resume",
    resumes="corerl_data.changed:resume_data",
    suffixes=(".parquet", ".csv", ".arrow", ".json"),
)
