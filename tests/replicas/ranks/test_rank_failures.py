"""Ranks that die, hang or never start: who hears of it, how soon, and what is left behind."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from hybridserve.parallel.step_channel.watch import RankFailure
from hybridserve.replicas.engine import local_ranks
from hybridserve.replicas.engine.sharded_executor import uninterrupted
from hybridserve.replicas.llm import LLM, SamplingParams

