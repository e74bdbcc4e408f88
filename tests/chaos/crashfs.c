/* Counts the calls that change files below a folder and, at the n-th, kills the process or lets the call fail.

   Preloaded (LD_PRELOAD) into a process that later arms it: crashfs_arm(folder, n, action, errno).
   An unarmed shim only passes calls on. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { COUNT, KILL, TEAR, FAIL, FAIL_ON };
enum { GO, HALF }; /* what is left to do of a call that does not simply fail */

static char folder[PATH_MAX];
static long at, count;
static int action, error;
static char calls[1 << 14];

void crashfs_arm(const char *where, long n, int what, int number) {
    folder[0] = 0;
    at = n, action = what, error = number, count = 0;
    memset(calls, 0, sizeof calls);
    snprintf(folder, sizeof folder, "%s", where);
}

/* One letter for each call so far. */
const char *crashfs_calls(void) { return calls; }

static void die(void) {
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;) pause();
}

static int below(const char *path) {
    size_t n = strlen(folder);
    return n && !strncmp(path, folder, n) && (path[n] == 0 || path[n] == '/' || path[n] == ' ');
}

static int fd_below(int fd) {
    char link[64], path[PATH_MAX];
    if (!folder[0]) return 0;
    int saved = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    errno = saved;
    if (n < 0) return 0;
    path[n] = 0;
    return below(path);
}

static int path_below(int dir, const char *path) {
    if (!folder[0] || !path) return 0;
    return path[0] == '/' || dir == AT_FDCWD ? below(path) : fd_below(dir);
}

/* A full disk refuses what needs space; a broken one everything. */
static int refuses(char kind) { return error != ENOSPC || strchr("owmrtflsp", kind) != NULL; }

/* -1: fail with errno. HALF: write half of the bytes, then die (TEAR) or come back short (FAIL_ON). */
static int meet(char kind) {
    long n = __atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST);
    if (n < (long)sizeof calls) calls[n - 1] = kind;
    if (action == COUNT || n < at || (n > at && action != FAIL_ON)) return GO;
    if (action == KILL) die();
    if (action == TEAR) return HALF;
    if (!refuses(kind)) return GO;
    if (n == at && action == FAIL_ON && kind == 'w') return HALF;
    errno = error;
    return -1;
}

#define REAL(type, name, ...)                        \
    static type (*real)(__VA_ARGS__);                \
    if (!real) real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

/* Calls without bytes: a torn one is done, and then the process dies. */
#define ACT(test, kind, call)                        \
    if (test) {                                      \
        int way = meet(kind);                        \
        if (way < 0) return -1;                      \
        if (way == HALF) { (void)!(call); die(); }   \
    }                                                \
    return call

#define OPEN(name)                                                               \
    int name(const char *path, int flags, ...) {                                 \
        REAL(int, name, const char *, int, ...);                                 \
        va_list rest; va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest); \
        ACT((flags & O_ACCMODE) != O_RDONLY && path_below(AT_FDCWD, path), 'o', real(path, flags, mode)); \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                             \
    int name(int dir, const char *path, int flags, ...) {                        \
        REAL(int, name, int, const char *, int, ...);                            \
        va_list rest; va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest); \
        ACT((flags & O_ACCMODE) != O_RDONLY && path_below(dir, path), 'o', real(dir, path, flags, mode)); \
    }
OPENAT(openat)
OPENAT(openat64)

#define BYTES(fd, size, whole, half)                 \
    if (fd_below(fd)) {                              \
        int way = meet('w');                         \
        if (way < 0) return -1;                      \
        if (way == HALF) {                           \
            ssize_t done = half;                     \
            if (action == TEAR) die();               \
            if ((size) / 2) return done;             \
            errno = error;                           \
            return -1;                               \
        }                                            \
    }                                                \
    return whole

ssize_t write(int fd, const void *data, size_t size) {
    REAL(ssize_t, write, int, const void *, size_t);
    BYTES(fd, size, real(fd, data, size), real(fd, data, size / 2));
}
#define PWRITE(name)                                                             \
    ssize_t name(int fd, const void *data, size_t size, off_t where) {           \
        REAL(ssize_t, name, int, const void *, size_t, off_t);                   \
        BYTES(fd, size, real(fd, data, size, where), real(fd, data, size / 2, where)); \
    }
PWRITE(pwrite)
PWRITE(pwrite64)
ssize_t writev(int fd, const struct iovec *parts, int n) {
    REAL(ssize_t, writev, int, const struct iovec *, int);
    BYTES(fd, n, real(fd, parts, n), real(fd, parts, n / 2));
}
#define SENDFILE(name)                                                           \
    ssize_t name(int to, int from, off_t *where, size_t size) {                  \
        REAL(ssize_t, name, int, int, off_t *, size_t);                          \
        BYTES(to, size, real(to, from, where, size), real(to, from, where, size / 2)); \
    }
SENDFILE(sendfile)
SENDFILE(sendfile64)
ssize_t copy_file_range(int from, off64_t *a, int to, off64_t *b, size_t size, unsigned flags) {
    REAL(ssize_t, copy_file_range, int, off64_t *, int, off64_t *, size_t, unsigned);
    BYTES(to, size, real(from, a, to, b, size, flags), real(from, a, to, b, size / 2, flags));
}

int fsync(int fd) { REAL(int, fsync, int); ACT(fd_below(fd), 's', real(fd)); }
int fdatasync(int fd) { REAL(int, fdatasync, int); ACT(fd_below(fd), 's', real(fd)); }
int close(int fd) {
    REAL(int, close, int);
    if (folder[0] && fd_below(fd) && (fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDONLY) {
        int way = meet('c'), number = errno;
        if (way != GO) {
            real(fd); /* a failed close has closed all the same */
            if (way == HALF) die();
            errno = number;
            return -1;
        }
    }
    return real(fd);
}
int ftruncate(int fd, off_t n) { REAL(int, ftruncate, int, off_t); ACT(fd_below(fd), 't', real(fd, n)); }
int ftruncate64(int fd, off64_t n) { REAL(int, ftruncate64, int, off64_t); ACT(fd_below(fd), 't', real(fd, n)); }
int truncate(const char *p, off_t n) { REAL(int, truncate, const char *, off_t); ACT(path_below(AT_FDCWD, p), 't', real(p, n)); }
int posix_fallocate(int fd, off_t a, off_t n) { REAL(int, posix_fallocate, int, off_t, off_t); ACT(fd_below(fd), 'f', real(fd, a, n)); }

int rename(const char *a, const char *b) { REAL(int, rename, const char *, const char *); ACT(path_below(AT_FDCWD, b), 'r', real(a, b)); }
int renameat(int d, const char *a, int e, const char *b) {
    REAL(int, renameat, int, const char *, int, const char *);
    ACT(path_below(e, b), 'r', real(d, a, e, b));
}
int link(const char *a, const char *b) { REAL(int, link, const char *, const char *); ACT(path_below(AT_FDCWD, b), 'l', real(a, b)); }
int symlink(const char *a, const char *b) { REAL(int, symlink, const char *, const char *); ACT(path_below(AT_FDCWD, b), 'l', real(a, b)); }
int mkdir(const char *p, mode_t m) { REAL(int, mkdir, const char *, mode_t); ACT(path_below(AT_FDCWD, p), 'm', real(p, m)); }
int mkdirat(int d, const char *p, mode_t m) { REAL(int, mkdirat, int, const char *, mode_t); ACT(path_below(d, p), 'm', real(d, p, m)); }
int rmdir(const char *p) { REAL(int, rmdir, const char *); ACT(path_below(AT_FDCWD, p), 'd', real(p)); }
int unlink(const char *p) { REAL(int, unlink, const char *); ACT(path_below(AT_FDCWD, p), 'u', real(p)); }
int unlinkat(int d, const char *p, int f) { REAL(int, unlinkat, int, const char *, int); ACT(path_below(d, p), 'u', real(d, p, f)); }

#define FCNTL(name)                                                              \
    int name(int fd, int command, ...) {                                         \
        REAL(int, name, int, int, ...);                                          \
        va_list rest; va_start(rest, command); void *what = va_arg(rest, void *); va_end(rest); \
        ACT((command == F_OFD_SETLK || command == F_OFD_SETLKW) && fd_below(fd), 'k', real(fd, command, what)); \
    }
FCNTL(fcntl)
FCNTL(fcntl64)
