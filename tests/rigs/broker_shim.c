/* Loaded into a broker's process (LD_PRELOAD): its wall clock runs ahead or behind, and its disk is full, as a file says.
 * BROKER_SHIM names the file, which tests/rigs/shim.py writes: struct control below. Monotonic time is left alone. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct control {
    long long ahead_s;
    long long full;
};

static volatile struct control none, *control = &none;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("BROKER_SHIM");
    int file = path == NULL ? -1 : open(path, O_RDONLY);
    if (file < 0) return;
    void *found = mmap(NULL, sizeof(struct control), PROT_READ, MAP_SHARED, file, 0);
    if (found != MAP_FAILED) control = found;
    close(file);
}

#define REAL(name) \
    static __typeof__(name) *real; \
    if (real == NULL) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

int clock_gettime(clockid_t id, struct timespec *at) {
    REAL(clock_gettime);
    int code = real(id, at);
    if (code == 0 && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) at->tv_sec += control->ahead_s;
    return code;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    REAL(gettimeofday);
    int code = real(at, zone);
    if (code == 0) at->tv_sec += control->ahead_s;
    return code;
}

time_t time(time_t *into) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (into != NULL) *into = at.tv_sec;
    return at.tv_sec;
}

/* Sockets and pipes are written as ever. */
static int refused(int file) {
    struct stat found;
    if (!control->full || fstat(file, &found) != 0 || !S_ISREG(found.st_mode)) return 0;
    errno = ENOSPC;
    return 1;
}

ssize_t write(int file, const void *bytes, size_t count) {
    REAL(write);
    return refused(file) ? -1 : real(file, bytes, count);
}

ssize_t writev(int file, const struct iovec *parts, int count) {
    REAL(writev);
    return refused(file) ? -1 : real(file, parts, count);
}

ssize_t pwrite(int file, const void *bytes, size_t count, off_t at) {
    REAL(pwrite);
    return refused(file) ? -1 : real(file, bytes, count, at);
}

ssize_t pwrite64(int file, const void *bytes, size_t count, off64_t at) {
    REAL(pwrite64);
    return refused(file) ? -1 : real(file, bytes, count, at);
}
