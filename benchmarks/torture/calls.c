/* Preloaded into the processes of benchmarks.torture: counts calls that change files below a folder,
   and at a chosen one kills the process, or makes the call fail. Unarmed, it does nothing. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char folder[PATH_MAX];
static long count, chosen;
static int fault; /* 0: only count; -1: kill; else the errno of the call, once */

void torture_arm(const char *below, long which, int what) {
    __atomic_store_n(&count, 0, __ATOMIC_SEQ_CST);
    chosen = which;
    fault = what;
    snprintf(folder, sizeof folder, "%s", below);
}

long torture_count(void) { return __atomic_load_n(&count, __ATOMIC_SEQ_CST); }

static int strikes(const char *path) {
    size_t length = strlen(folder);
    if (!length || !path || strncmp(path, folder, length)) return 0;
    if (__atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST) != chosen || !fault) return 0;
    if (fault == -1) kill(getpid(), SIGKILL);
    errno = fault;
    return 1;
}

static int strikes_number(int number) {
    char link[64], path[PATH_MAX];
    if (!folder[0]) return 0;
    int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", number);
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = before;
    if (length < 0) return 0;
    path[length] = 0;
    return strikes(path);
}

#define REAL(name) ((__typeof__(name) *)dlsym(RTLD_NEXT, #name))
#define OF_PATH(type, name, parameters, arguments) \
    type name parameters { return strikes(path) ? -1 : REAL(name) arguments; }
#define OF_NUMBER(type, name, parameters, arguments) \
    type name parameters { return strikes_number(number) ? -1 : REAL(name) arguments; }
#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        int changes = flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC); \
        return changes && strikes(path) ? -1 : REAL(name)(path, flags, mode); \
    }
#define OPENAT(name) \
    int name(int at, const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        int changes = flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC); \
        return changes && strikes(path) ? -1 : REAL(name)(at, path, flags, mode); \
    }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
OF_PATH(int, mkdir, (const char *path, mode_t mode), (path, mode))
OF_PATH(int, unlink, (const char *path), (path))
OF_PATH(int, rmdir, (const char *path), (path))
OF_PATH(int, rename, (const char *path, const char *to), (path, to))
OF_PATH(int, truncate, (const char *path, off_t size), (path, size))
OF_PATH(int, truncate64, (const char *path, off64_t size), (path, size))
OF_NUMBER(int, ftruncate, (int number, off_t size), (number, size))
OF_NUMBER(int, ftruncate64, (int number, off64_t size), (number, size))
OF_NUMBER(ssize_t, write, (int number, const void *data, size_t size), (number, data, size))
OF_NUMBER(int, fsync, (int number), (number))
OF_NUMBER(int, fdatasync, (int number), (number))
