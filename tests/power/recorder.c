/* A recorder of everything a process does to the files below one directory, SQLite included: LD_PRELOAD.
 *
 * RECORDER_ROOT names the directory, RECORDER_LOG the file to append to. Each event is one line of fields separated by tabs,
 * names and attributes in hex; a write is followed by its bytes and a newline:
 *
 *   file  OBJECT DIRECTORY NAME      a file was made          dir    OBJECT DIRECTORY NAME     a directory was made
 *   link  OBJECT DIRECTORY NAME      another name of it       unlink DIRECTORY NAME            also of rmdir
 *   rename DIRECTORY NAME DIRECTORY NAME
 *   write OBJECT OFFSET LENGTH       size   OBJECT LENGTH     attr   OBJECT NAME VALUE         VALUE "-": it was removed
 *   sync  OBJECT                     fsync                    datasync OBJECT                  fdatasync
 *   mark  TEXT                       what the program itself wants to say: recorder_mark()
 *
 * OBJECT and DIRECTORY are numbers this library gives out, by device and inode; the root is 0. One mutex is held across each
 * call and its line, so that the order of lines is the order of effects; an event is there when the call has returned.
 * Mapped memory is not recorded: SQLite maps its -shm only, which counts for nothing after a power cut.
 *
 * RECORDER_FAIL names a file: while it exists, fsync and fdatasync of what has "/segments/" in its path fail with EIO, without being
 * carried out. Needs none of the other two.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/xattr.h>
#include <unistd.h>

static pthread_mutex_t mutex = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static char root[PATH_MAX];
static size_t root_length;
static FILE *out;
static dev_t device;
static long given = 0;

enum { OBJECTS_MAX = 1 << 16 };
static struct { ino_t inode; long object; } objects[OBJECTS_MAX];

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define LOCK pthread_mutex_lock(&mutex)
#define UNLOCK do { int kept = errno; fflush(out); pthread_mutex_unlock(&mutex); errno = kept; } while (0)

static long *slot(ino_t inode) {
    size_t at = (size_t)inode * 2654435761u % OBJECTS_MAX;
    while (objects[at].inode && objects[at].inode != inode) at = (at + 1) % OBJECTS_MAX;
    objects[at].inode = inode;
    return &objects[at].object;
}

__attribute__((constructor)) static void begin(void) {
    const char *directory = getenv("RECORDER_ROOT"), *log = getenv("RECORDER_LOG");
    struct stat status;
    if (!directory || !log || !realpath(directory, root) || stat(root, &status)) return;
    root_length = strlen(root);
    device = status.st_dev;
    *slot(status.st_ino) = 0;
    int descriptor = REAL(open64)(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    out = descriptor < 0 ? NULL : fdopen(descriptor, "a");
}

/* The absolute path of a name that is to be made or removed, if it lies below the root; 0 if it does not, or nothing is recorded. */
static int inside(int at, const char *path, char *absolute) {
    char joined[2 * PATH_MAX], link[64], parent[PATH_MAX];
    if (!out || !path) return 0;
    if (path[0] == '/') {
        snprintf(joined, sizeof joined, "%s", path);
    } else {
        if (at == AT_FDCWD) {
            if (!getcwd(parent, sizeof parent)) return 0;
        } else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", at);
            ssize_t length = readlink(link, parent, sizeof parent - 1);
            if (length < 0) return 0;
            parent[length] = 0;
        }
        snprintf(joined, sizeof joined, "%s/%s", parent, path);
    }
    char *last = strrchr(joined, '/');
    if (!last[1]) return 0;
    *last = 0;
    if (!realpath(joined[0] ? joined : "/", parent)) return 0;
    if ((size_t)snprintf(absolute, PATH_MAX, "%s/%s", parent, last + 1) >= PATH_MAX) return 0;
    return !strncmp(parent, root, root_length) && (parent[root_length] == '/' || !parent[root_length]);
}

static void name(const char *absolute) { /* the directory's object and the name in hex */
    char parent[PATH_MAX];
    struct stat status;
    const char *last = strrchr(absolute, '/');
    snprintf(parent, sizeof parent, "%.*s", (int)(last - absolute), absolute);
    stat(parent, &status);
    fprintf(out, "\t%ld\t", *slot(status.st_ino));
    while (*++last) fprintf(out, "%02x", (unsigned char)*last);
}

static int object_of(int descriptor, long *object) {
    struct stat status;
    if (!out || fstat(descriptor, &status) || status.st_dev != device) return 0;
    if (!S_ISREG(status.st_mode) && !S_ISDIR(status.st_mode)) return 0;
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    if (strncmp(path, root, root_length) || (path[root_length] != '/' && path[root_length])) return 0;
    LOCK;
    *object = *slot(status.st_ino);
    UNLOCK;
    return 1;
}

static void made(const char *absolute) {
    struct stat status;
    if (lstat(absolute, &status) || !(S_ISREG(status.st_mode) || S_ISDIR(status.st_mode))) return;
    *slot(status.st_ino) = ++given;
    fprintf(out, "%s\t%ld", S_ISDIR(status.st_mode) ? "dir" : "file", given);
    name(absolute);
    fputc('\n', out);
}

void recorder_mark(const char *text) {
    if (!out) return;
    LOCK;
    fprintf(out, "mark\t%s\n", text);
    UNLOCK;
}

static int opened(int at, const char *path, int flags, mode_t mode) {
    char absolute[PATH_MAX];
    struct stat status;
    if (!(flags & (O_CREAT | O_TRUNC)) || !inside(at, path, absolute)) return REAL(openat64)(at, path, flags, mode);
    LOCK;
    int is_new = lstat(absolute, &status) != 0;
    int descriptor = REAL(openat64)(at, path, flags, mode);
    if (descriptor >= 0 && is_new) made(absolute);
    else if (descriptor >= 0 && flags & O_TRUNC) fprintf(out, "size\t%ld\t0\n", *slot(status.st_ino));
    UNLOCK;
    return descriptor;
}

#define OPEN(function, at, ...) \
    mode_t mode = 0; \
    if (flags & (O_CREAT | (O_TMPFILE & ~O_DIRECTORY))) { va_list more; va_start(more, flags); mode = va_arg(more, mode_t); va_end(more); } \
    return opened(at, path, flags, mode);
int open(const char *path, int flags, ...) { OPEN(open, AT_FDCWD) }
int open64(const char *path, int flags, ...) { OPEN(open64, AT_FDCWD) }
int openat(int at, const char *path, int flags, ...) { OPEN(openat, at) }
int openat64(int at, const char *path, int flags, ...) { OPEN(openat64, at) }

static void wrote(long object, const void *data, size_t count, off64_t offset) {
    fprintf(out, "write\t%ld\t%lld\t%zu\n", object, (long long)offset, count);
    fwrite(data, 1, count, out);
    fputc('\n', out);
}

ssize_t pwrite64(int descriptor, const void *data, size_t count, off64_t offset) {
    long object;
    if (!object_of(descriptor, &object)) return REAL(pwrite64)(descriptor, data, count, offset);
    LOCK;
    ssize_t done = REAL(pwrite64)(descriptor, data, count, offset);
    if (done > 0) wrote(object, data, done, offset);
    UNLOCK;
    return done;
}
ssize_t pwrite(int descriptor, const void *data, size_t count, off_t offset) { return pwrite64(descriptor, data, count, offset); }

ssize_t write(int descriptor, const void *data, size_t count) {
    long object;
    if (!object_of(descriptor, &object)) return REAL(write)(descriptor, data, count);
    LOCK;
    ssize_t done = REAL(write)(descriptor, data, count);
    if (done > 0) wrote(object, data, done, lseek64(descriptor, 0, SEEK_CUR) - done);
    UNLOCK;
    return done;
}

ssize_t writev(int descriptor, const struct iovec *vectors, int vector_count) {
    ssize_t total = 0;
    long object;
    if (!object_of(descriptor, &object)) return REAL(writev)(descriptor, vectors, vector_count);
    for (int i = 0; i < vector_count; i++) {
        ssize_t done = write(descriptor, vectors[i].iov_base, vectors[i].iov_len);
        if (done < 0) return total ? total : done;
        total += done;
        if ((size_t)done < vectors[i].iov_len) break;
    }
    return total;
}

ssize_t pwritev2(int descriptor, const struct iovec *vectors, int vector_count, off_t offset, int flags) {
    ssize_t total = 0;
    long object;
    if (!object_of(descriptor, &object)) return REAL(pwritev2)(descriptor, vectors, vector_count, offset, flags);
    for (int i = 0; i < vector_count; i++) {
        ssize_t done = pwrite64(descriptor, vectors[i].iov_base, vectors[i].iov_len, offset + total);
        if (done < 0) return total ? total : done;
        total += done;
        if ((size_t)done < vectors[i].iov_len) break;
    }
    return total;
}
ssize_t pwritev64v2(int d, const struct iovec *v, int n, off64_t offset, int flags) { return pwritev2(d, v, n, offset, flags); }
ssize_t pwritev(int d, const struct iovec *v, int n, off_t offset) { return pwritev2(d, v, n, offset, 0); }
ssize_t pwritev64(int d, const struct iovec *v, int n, off64_t offset) { return pwritev2(d, v, n, offset, 0); }

/* Copied in the kernel, in reality; here by reading and writing, so that the bytes are seen. */
ssize_t copy_file_range(int from, off64_t *from_offset, int to, off64_t *to_offset, size_t count, unsigned flags) {
    long object;
    char buffer[1 << 16];
    if (!object_of(to, &object)) return REAL(copy_file_range)(from, from_offset, to, to_offset, count, flags);
    if (count > sizeof buffer) count = sizeof buffer;
    ssize_t done = from_offset ? pread64(from, buffer, count, *from_offset) : read(from, buffer, count);
    if (done <= 0) return done;
    done = to_offset ? pwrite64(to, buffer, done, *to_offset) : write(to, buffer, done);
    if (done > 0 && from_offset) *from_offset += done;
    if (done > 0 && to_offset) *to_offset += done;
    return done;
}

ssize_t sendfile64(int to, int from, off64_t *offset, size_t count) {
    long object;
    if (!object_of(to, &object)) return REAL(sendfile64)(to, from, offset, count);
    return copy_file_range(from, offset, to, NULL, count, 0);
}
ssize_t sendfile(int to, int from, off_t *offset, size_t count) { return sendfile64(to, from, offset, count); }

int ftruncate64(int descriptor, off64_t length) {
    long object;
    if (!object_of(descriptor, &object)) return REAL(ftruncate64)(descriptor, length);
    LOCK;
    int failed = REAL(ftruncate64)(descriptor, length);
    if (!failed) fprintf(out, "size\t%ld\t%lld\n", object, (long long)length);
    UNLOCK;
    return failed;
}
int ftruncate(int descriptor, off_t length) { return ftruncate64(descriptor, length); }

int truncate64(const char *path, off64_t length) {
    int descriptor = REAL(open64)(path, O_WRONLY | O_CLOEXEC);
    if (descriptor < 0) return -1;
    int failed = ftruncate64(descriptor, length);
    close(descriptor);
    return failed;
}
int truncate(const char *path, off_t length) { return truncate64(path, length); }

int fallocate64(int descriptor, int mode, off64_t offset, off64_t length) {
    long object;
    struct stat before, after;
    if (mode & FALLOC_FL_KEEP_SIZE || !object_of(descriptor, &object)) /* room beyond the end, without effect on bytes */
        return REAL(fallocate64)(descriptor, mode, offset, length);
    LOCK;
    fstat(descriptor, &before);
    int failed = REAL(fallocate64)(descriptor, mode, offset, length);
    if (!failed && !fstat(descriptor, &after) && after.st_size != before.st_size)
        fprintf(out, "size\t%ld\t%lld\n", object, (long long)after.st_size);
    UNLOCK;
    return failed;
}
int fallocate(int descriptor, int mode, off_t offset, off_t length) { return fallocate64(descriptor, mode, offset, length); }

static int renamed(int old_at, const char *old, int new_at, const char *new, unsigned flags) {
    char from[PATH_MAX], to[PATH_MAX];
    int recorded = inside(old_at, old, from) & inside(new_at, new, to);
    if (!recorded) return REAL(renameat2)(old_at, old, new_at, new, flags);
    LOCK;
    int failed = REAL(renameat2)(old_at, old, new_at, new, flags);
    if (!failed) { fputs("rename", out); name(from); name(to); fputc('\n', out); }
    UNLOCK;
    return failed;
}
int rename(const char *old, const char *new) { return renamed(AT_FDCWD, old, AT_FDCWD, new, 0); }
int renameat(int old_at, const char *old, int new_at, const char *new) { return renamed(old_at, old, new_at, new, 0); }
int renameat2(int old_at, const char *old, int new_at, const char *new, unsigned flags) { return renamed(old_at, old, new_at, new, flags); }

int linkat(int old_at, const char *old, int new_at, const char *new, int flags) {
    char to[PATH_MAX];
    struct stat status;
    if (!inside(new_at, new, to)) return REAL(linkat)(old_at, old, new_at, new, flags);
    LOCK;
    int failed = REAL(linkat)(old_at, old, new_at, new, flags);
    if (!failed && !lstat(to, &status)) { fprintf(out, "link\t%ld", *slot(status.st_ino)); name(to); fputc('\n', out); }
    UNLOCK;
    return failed;
}
int link(const char *old, const char *new) { return linkat(AT_FDCWD, old, AT_FDCWD, new, 0); }

int unlinkat(int at, const char *path, int flags) {
    char absolute[PATH_MAX];
    if (!inside(at, path, absolute)) return REAL(unlinkat)(at, path, flags);
    LOCK;
    int failed = REAL(unlinkat)(at, path, flags);
    if (!failed) { fputs("unlink", out); name(absolute); fputc('\n', out); }
    UNLOCK;
    return failed;
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
int remove(const char *path) { return unlink(path) && errno == EISDIR ? rmdir(path) : 0; }

int mkdirat(int at, const char *path, mode_t mode) {
    char absolute[PATH_MAX];
    if (!inside(at, path, absolute)) return REAL(mkdirat)(at, path, mode);
    LOCK;
    int failed = REAL(mkdirat)(at, path, mode);
    if (!failed) made(absolute);
    UNLOCK;
    return failed;
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

static int fails(int descriptor) {
    const char *sign = getenv("RECORDER_FAIL");
    char link[64], path[PATH_MAX];
    if (!sign || access(sign, F_OK)) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return strstr(path, "/segments/") != NULL;
}

static int synced(int descriptor, const char *word, int (*real)(int)) {
    long object;
    if (fails(descriptor)) {
        errno = EIO;
        return -1;
    }
    if (!object_of(descriptor, &object)) return real(descriptor);
    LOCK;
    int failed = real(descriptor);
    if (!failed) fprintf(out, "%s\t%ld\n", word, object);
    UNLOCK;
    return failed;
}
int fsync(int descriptor) { return synced(descriptor, "sync", REAL(fsync)); }
int fdatasync(int descriptor) { return synced(descriptor, "datasync", REAL(fdatasync)); }

static void hex(const void *data, size_t count) {
    fputc('\t', out);
    for (size_t i = 0; i < count; i++) fprintf(out, "%02x", ((const unsigned char *)data)[i]);
}

int fsetxattr(int descriptor, const char *attribute, const void *value, size_t size, int flags) {
    long object;
    if (!object_of(descriptor, &object)) return REAL(fsetxattr)(descriptor, attribute, value, size, flags);
    LOCK;
    int failed = REAL(fsetxattr)(descriptor, attribute, value, size, flags);
    if (!failed) { fprintf(out, "attr\t%ld", object); hex(attribute, strlen(attribute)); hex(value, size); fputc('\n', out); }
    UNLOCK;
    return failed;
}
int setxattr(const char *path, const char *attribute, const void *value, size_t size, int flags) {
    int descriptor = REAL(open64)(path, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) return -1;
    int failed = fsetxattr(descriptor, attribute, value, size, flags);
    close(descriptor);
    return failed;
}
int fremovexattr(int descriptor, const char *attribute) {
    long object;
    if (!object_of(descriptor, &object)) return REAL(fremovexattr)(descriptor, attribute);
    LOCK;
    int failed = REAL(fremovexattr)(descriptor, attribute);
    if (!failed) { fprintf(out, "attr\t%ld", object); hex(attribute, strlen(attribute)); fputs("\t-\n", out); }
    UNLOCK;
    return failed;
}
