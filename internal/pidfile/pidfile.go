// SPDX-License-Identifier: Apache-2.0

// Package pidfile writes files that hold the number of a process.
//
// A file is made aside and renamed over its path, so that readers always find a
// whole one, and whatever fails leaves the file before as it was. It ends with
// [File.Remove], which leaves the file of somebody else alone, or with the
// process, which leaves a stale file.
//
// While the owner lives it holds a lock on the file, a shared flock(2). That tells
// a living owner from a stale file whose number some other process has by now.
// Whoever changes what is at the path holds a lock on the file that is there:
// an exclusive one to remove the file or to replace a stale one, which no living
// owner leaves room for, and a shared one to replace a living predecessor's. So
// of two that start at once, one is refused, and a predecessor that leaves
// never removes the file that its successor is putting there.
//
// Everybody who may read the file may lock it and so keep a server from starting.
// Where local users are not trusted it belongs into a folder that is closed to
// them, like the RuntimeDirectory= of a systemd unit with
// RuntimeDirectoryMode=0750.
package pidfile

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"instar/internal/rawconn"
)

const (
	// mode lets everybody read the file, as is the custom.
	mode = 0o644
	// maxSize is more than a number, a line end and some blanks.
	maxSize = 64
	// patience is how long another lock on the file may last before it counts as
	// a living owner's: others hold one while they look or replace.
	patience  = 250 * time.Millisecond
	pollLimit = 10 * time.Millisecond
)

// InUseError says that a living process owns the file.
type InUseError struct {
	Path string
	// PID is what the file says, 0 when it is empty. Where processes of several
	// PID namespaces use one file it may be another process here.
	PID int
}

func (e *InUseError) Error() string {
	return fmt.Sprintf("write PID file %s: process %d owns it and lives; stop that one or have it upgrade, or use another path", e.Path, e.PID)
}

// File is a PID file of this process. Its methods may be called by several
// goroutines.
type File struct {
	path string

	mu sync.Mutex
	f  *os.File // locked; nil after Remove and Close
}

// Options of Write. The zero value is right for a process without a predecessor.
type Options struct {
	// Replace allows to replace the file of a living owner, which in an upgrade
	// is the predecessor. Default: such a file is somebody else's, and stays.
	Replace bool
}

// Write makes path a PID file of this process, which stays its owner until Remove
// or Close.
//
// A stale file is replaced. One whose owner lives is replaced where the options
// say so; otherwise Write returns an *InUseError. A file that holds something
// else than a number is nobody's PID file and stays in any case.
func Write(path string, o Options) (*File, error) {
	if path == "" {
		return nil, errors.New("write PID file: the path is empty")
	}
	path, err := filepath.Abs(path) // the process may change its folder
	if err != nil {
		return nil, fmt.Errorf("write PID file: %w", err)
	}
	f, err := publish(path, o.Replace)
	if err != nil {
		return nil, err
	}
	return &File{path: path, f: f}, nil
}

// Rewrite makes the path this process's again: when a successor has replaced the
// file and this process takes back what it handed over, or when somebody removed
// it. The file at the path is replaced even if its owner lives; when it still is
// this process's nothing changes.
//
// After an error the File is as it was before.
func (f *File) Rewrite() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.f == nil {
		return fmt.Errorf("rewrite PID file %s: %w", f.path, os.ErrClosed)
	}
	ours, err := isAt(f.f, f.path)
	if err != nil {
		return fmt.Errorf("rewrite PID file: %w", err)
	}
	if ours {
		return nil
	}
	again, err := publish(f.path, true)
	if err != nil {
		return err
	}
	old := f.f
	f.f = again
	if err := unlockAndClose(old); err != nil {
		return fmt.Errorf("close the PID file before: %w", err)
	}
	return nil
}

// Close ends this process's ownership and leaves the file where it is: for a
// predecessor whose successor has the file, or will replace it. Calls after the
// first, or after Remove, do nothing.
func (f *File) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.f == nil {
		return nil
	}
	err := unlockAndClose(f.f)
	f.f = nil
	if err != nil {
		return fmt.Errorf("close PID file: %w", err)
	}
	return nil
}

// Remove removes the file, unless another one is at the path by now, and ends
// this process's ownership in each case. Calls after the first, or after Close,
// do nothing.
func (f *File) Remove() (err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.f == nil {
		return nil
	}
	defer func() {
		if err = errors.Join(err, unlockAndClose(f.f)); err != nil {
			err = fmt.Errorf("remove PID file: %w", err)
		}
		f.f = nil
	}()
	// Nobody replaces the file while the lock is exclusive. Who has it now is
	// about to replace the file, or only looks.
	err = poll(func() error { return lock(f.f, unix.LOCK_EX) })
	switch {
	case errors.Is(err, errBusy):
		return fmt.Errorf("%s: another process holds a lock on it; it stays, stale", f.path)
	case err != nil:
		return err
	}
	ours, err := isAt(f.f, f.path)
	if err != nil || !ours {
		return err
	}
	return os.Remove(f.path)
}

// Path returns the path, made absolute.
func (f *File) Path() string { return f.path }

// Read returns the number in the file, and whether the owner that wrote it lives.
// A file that was not written by this package has no such owner.
func Read(path string) (pid int, owned bool, err error) {
	fail := func(err error) (int, bool, error) {
		return 0, false, fmt.Errorf("read PID file: %w", err)
	}
	err = poll(func() error {
		f, err := open(path)
		if err != nil {
			return err
		}
		defer func() { _ = unlockAndClose(f) }() // it was only read
		if pid, err = parse(f); err != nil {
			return err
		}
		if pid == 0 {
			return fmt.Errorf("%s: it is empty", path)
		}
		err = lock(f, unix.LOCK_EX)
		owned = errors.Is(err, errBusy)
		if owned && !errors.Is(unix.Kill(pid, 0), unix.ESRCH) {
			return nil // no need to wait for others who only look
		}
		return err
	})
	if err != nil && !errors.Is(err, errBusy) {
		return fail(err)
	}
	return pid, owned, nil
}

var (
	// errBusy says that somebody else has a lock.
	errBusy = errors.New("locked")
	// errChanged says that another file is at the path than was looked at.
	errChanged = errors.New("other processes replace the file again and again")
)

// poll calls f until it returns something else than errBusy and errChanged, but
// not for longer than patience. flock(2) can wait by itself, but only a signal
// would end that.
func poll(f func() error) error {
	deadline := time.Now().Add(patience)
	for pause := 200 * time.Microsecond; ; pause = min(2*pause, pollLimit) {
		err := f()
		if !errors.Is(err, errBusy) && !errors.Is(err, errChanged) || time.Now().After(deadline) {
			return err
		}
		time.Sleep(pause)
	}
}

// publish puts a new file at the path and returns it, with a shared lock. It may
// replace a living owner's if living is set.
func publish(path string, living bool) (_ *os.File, err error) {
	temp, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return nil, fmt.Errorf("write PID file %s: %w%s", path, err, hint(err))
	}
	published := false
	defer func() {
		if !published {
			err = errors.Join(err, unlockAndClose(temp), os.Remove(temp.Name()))
		}
	}()
	if err := fill(temp); err != nil {
		return nil, fmt.Errorf("write PID file %s: %w%s", path, err, hint(err))
	}
	var owner int
	err = poll(func() (err error) {
		owner, err = replace(temp.Name(), path, living)
		return err
	})
	switch {
	case errors.Is(err, errBusy):
		return nil, &InUseError{path, owner}
	case err != nil:
		return nil, fmt.Errorf("write PID file %s: %w%s", path, err, hint(err))
	}
	published = true
	return temp, nil
}

// fill writes this process's number into the file and locks it.
func fill(f *os.File) error {
	if _, err := fmt.Fprintln(f, os.Getpid()); err != nil {
		return err
	}
	if err := f.Chmod(mode); err != nil { // whatever the umask is
		return err
	}
	// Some file systems find out here that they are full.
	if err := f.Sync(); err != nil {
		return err
	}
	return lock(f, unix.LOCK_SH)
}

// replace renames temp over path, when nobody owns the file there or living is
// set. It returns errBusy when somebody else has a lock, and errChanged when
// it has to look again. owner is the number in the file.
func replace(temp, path string, living bool) (owner int, err error) {
	old, err := open(path)
	if errors.Is(err, fs.ErrNotExist) {
		err := unix.Renameat2(unix.AT_FDCWD, temp, unix.AT_FDCWD, path, unix.RENAME_NOREPLACE)
		if errors.Is(err, unix.EEXIST) {
			return 0, errChanged
		}
		if err != nil {
			return 0, &os.LinkError{Op: "rename", Old: temp, New: path, Err: err}
		}
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	defer func() { _ = unlockAndClose(old) }() // it was only read
	return replaceOpen(old, temp, path, living)
}

// replaceOpen is replace when there is a file at the path, old.
func replaceOpen(old *os.File, temp, path string, living bool) (owner int, err error) {
	if owner, err = parse(old); err != nil {
		return 0, err
	}
	how := unix.LOCK_EX
	if living {
		how = unix.LOCK_SH
	}
	if err := lock(old, how); err != nil {
		return owner, err
	}
	switch at, err := isAt(old, path); {
	case err != nil:
		return owner, err
	case !at:
		return owner, errChanged
	}
	return owner, os.Rename(temp, path)
}

// open opens what is to be a PID file, for reading.
func open(path string) (*os.File, error) {
	// Not blocking, in case it is a FIFO.
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, unix.ELOOP) {
		return nil, fmt.Errorf("%s is a symbolic link; name its target, or remove it", path)
	}
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is no regular file; remove it, or use another path", path)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// parse returns the number in the file, 0 when it is empty, and an error when it
// holds anything else.
func parse(f *os.File) (int, error) {
	data, err := io.ReadAll(io.NewSectionReader(f, 0, maxSize+1))
	if err != nil {
		return 0, err
	}
	text := bytes.TrimSpace(data)
	if len(text) == 0 && len(data) <= maxSize {
		return 0, nil
	}
	pid, err := strconv.ParseUint(string(text), 10, 31)
	if err != nil || len(data) > maxSize || pid == 0 || pid > math.MaxInt32 {
		return 0, fmt.Errorf("%s holds something else than the number of a process; remove it, or use another path", f.Name())
	}
	return int(pid), nil
}

// isAt reports whether the path is that of the open file.
func isAt(f *os.File, path string) (bool, error) {
	mine, err := f.Stat()
	if err != nil {
		return false, err
	}
	there, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return os.SameFile(mine, there), nil
}

// lock changes the lock of the open file, and returns errBusy when others have one
// that it does not go with. The one before may be lost then.
func lock(f *os.File, how int) error {
	err := flock(f, how|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return errBusy
	}
	return err
}

func flock(f *os.File, how int) error {
	return rawconn.Of(f, func(fd int) error {
		for {
			if err := unix.Flock(fd, how); err != unix.EINTR {
				return os.NewSyscallError("flock", err)
			}
		}
	})
}

// unlockAndClose unlocks first: a process that is being started has a duplicate of
// the descriptor until it executes.
func unlockAndClose(f *os.File) error {
	return errors.Join(flock(f, unix.LOCK_UN), f.Close())
}

// hint says what to do about an error, where there is something.
func hint(err error) string {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "; create the folder, or have systemd do it (RuntimeDirectory=)"
	case errors.Is(err, fs.ErrPermission):
		return "; this user needs the right to write to the folder, and to read the file there"
	case errors.Is(err, unix.EROFS):
		return "; use a path that this process may write to, like one in /run (ReadWritePaths=, RuntimeDirectory=)"
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return "; make room there"
	}
	return ""
}
