"""Tasks: loss, sums to log, predictions and metrics."""

# one class for each image, and its losses
from utils.tasks.classification import LOSSES, Classification

# tasks by name
from utils.tasks.table import TASKS, make_task

# the interface of a task
from utils.tasks.task import Predictions, Task, score_rows, sigmoid
