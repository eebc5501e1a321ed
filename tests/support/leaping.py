"""A library for ``LD_PRELOAD`` that makes the wall clock of a process jump by an hour both ways.

Monotonic clocks and the kernel's time stamps of files stay as they are, as when an administrator sets the clock.
"""

import os
import shutil
import subprocess
from pathlib import Path

SOURCE = """
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static int real(clockid_t id, struct timespec *t) { return syscall(SYS_clock_gettime, id, t); }
static long jump(void) {
  struct timespec t;
  real(CLOCK_MONOTONIC, &t);
  long tenth = t.tv_sec * 10 + t.tv_nsec / 100000000;
  return ((tenth * 7919) % 3 - 1) * 3600;  /* another hour every tenth of a second */
}
int clock_gettime(clockid_t id, struct timespec *t) {
  int result = real(id, t);
  if (!result && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) t->tv_sec += jump();
  return result;
}
int gettimeofday(struct timeval *restrict tv, void *restrict tz) {
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  tv->tv_sec = t.tv_sec;
  tv->tv_usec = t.tv_nsec / 1000;
  return 0;
}
time_t time(time_t *out) {
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  if (out) *out = t.tv_sec;
  return t.tv_sec;
}
"""


def environment(folder: Path) -> dict[str, str] | None:
    """Return the environment variables of a process whose clock jumps; None without Linux and a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None or os.uname().sysname != "Linux":
        return None
    (folder / "leaping.c").write_text(SOURCE)
    made = subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "leaping.so", folder / "leaping.c"])
    return None if made.returncode else {**os.environ, "LD_PRELOAD": str(folder / "leaping.so")}
