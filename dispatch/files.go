// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"syscall"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"instar/internal/bpffs"
)

// Files passes open files to later processes by name. *handover.Handover of package
// instar/handover is one.
type Files interface {
	// File returns the file of that name that an earlier process passed. It is passed on
	// while it is open. The error is fs.ErrNotExist when there is none.
	File(name string) (*os.File, error)
	// Add passes a file on while it is open.
	Add(name string, file syscall.Conn) error
	// Remove takes a name back.
	Remove(name string)
}

// pinState is the file, in memory, that stands for the folder of a group without pins:
// it is locked and touched, and holds a descriptorsState.
const pinState = "state"

type descriptorsState struct {
	// Namespace is the name of the group's network namespace.
	Namespace string `json:"netns"`
	// Program is the kernel's number of the group's program.
	Program ebpf.ProgramID `json:"program"`
}

// descriptors are a group's objects without a folder.
type descriptors struct {
	files Files
	key   key
	held  map[string]*os.File
}

// openDescriptors takes what an earlier process passed. The error is fs.ErrNotExist when
// there is nothing of the group, and something else when there is only a part of it.
func openDescriptors(files Files, k key) (d *descriptors, err error) {
	d = &descriptors{files, k, make(map[string]*os.File)}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.close())
			d = nil
		}
	}()
	for _, name := range []string{pinState, pinControl, pinSockets, pinSecrets, pinVerdicts, pinFlows, pinProgram} {
		f, err := files.File(d.name(name))
		switch {
		case err == nil:
			d.held[name] = f
		case !errors.Is(err, fs.ErrNotExist):
			return d, fmt.Errorf("open group %s: %w", d, err)
		case name == pinState:
			return d, fs.ErrNotExist
		case name != pinFlows: // not every steering has it
			return d, damaged(d, "%q was handed over and %q was not", d.name(pinState), d.name(name))
		}
	}
	s, err := d.state()
	if err != nil {
		return d, err
	}
	here, err := namespaceName()
	if err == nil && here != s.Namespace {
		err = fmt.Errorf("open group %s: %w: it is of another network namespace; start the successor in that of its predecessor", d, ErrMismatch)
	}
	return d, err
}

// name is that of a file. Services managers refuse colons in names.
func (d *descriptors) name(of string) string {
	return strings.ReplaceAll(d.key.folder(), ":", "_") + "/" + of
}

// makeDescriptors makes the objects of a new group.
func makeDescriptors(o Options, k key, namespace string, prefix int) (d *descriptors, err error) {
	p, err := load(o, prefix)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, p.close()) }()
	if err := initialise(p, o, k, prefix); err != nil {
		return nil, err
	}
	d = &descriptors{o.Files, k, make(map[string]*os.File)}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.close())
			d = nil
		}
	}()
	memory, err := memoryFile("instar " + k.String())
	if err != nil {
		return d, fmt.Errorf("create group: %w", err)
	}
	d.held[pinState] = memory
	id, err := programID(p.program)
	if err == nil {
		err = d.setState(descriptorsState{namespace, id})
	}
	if err != nil {
		return d, fmt.Errorf("create group: %w", err)
	}
	for name, m := range p.maps() {
		if d.held[name], err = duplicate(m.FD(), d.name(name)); err != nil {
			return d, fmt.Errorf("create group: %w", err)
		}
	}
	if d.held[pinProgram], err = duplicate(p.program.FD(), d.name(pinProgram)); err != nil {
		return d, fmt.Errorf("create group: %w", err)
	}
	for name, f := range d.held {
		if err := d.files.Add(d.name(name), f); err != nil {
			return d, fmt.Errorf("create group: %w", err)
		}
	}
	return d, nil
}

// memoryFile makes a file that has no name.
func memoryFile(label string) (*os.File, error) {
	fd, err := unix.MemfdCreate(label, unix.MFD_CLOEXEC|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) { // before Linux 6.3
		fd, err = unix.MemfdCreate(label, unix.MFD_CLOEXEC)
	}
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	return os.NewFile(uintptr(fd), label), nil
}

func duplicate(fd int, name string) (*os.File, error) {
	fd, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, os.NewSyscallError("fcntl F_DUPFD_CLOEXEC", err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

func programID(p *ebpf.Program) (ebpf.ProgramID, error) {
	info, err := p.Info()
	if err != nil {
		return 0, err
	}
	id, ok := info.ID()
	if !ok {
		return 0, fmt.Errorf("%w: the kernel tells no number of a program", ErrNotSupported)
	}
	return id, nil
}

func (d *descriptors) state() (s descriptorsState, err error) {
	b, err := io.ReadAll(io.NewSectionReader(d.held[pinState], 0, 4096))
	if err == nil {
		err = json.NewDecoder(bytes.NewReader(b)).Decode(&s)
	}
	if err != nil {
		return s, damaged(d, "its file %q: %v", d.name(pinState), err)
	}
	return s, nil
}

// setState needs the lock, or a group that nobody else has.
func (d *descriptors) setState(s descriptorsState) error {
	b, err := json.Marshal(s)
	if err != nil {
		return err
	}
	// Of a shorter text the rest of the old one would follow: the decoder stops before it,
	// and one write is seen whole or not at all by those who hold the lock.
	_, err = d.held[pinState].WriteAt(append(b, '\n'), 0)
	return err
}

func (d *descriptors) String() string { return d.key.String() + " (without pins)" }
func (d *descriptors) path() string {
	return fmt.Sprintf("/proc/self/fd/%d", d.held[pinState].Fd())
}

func (d *descriptors) remedy() string {
	return "stop its servers, with which it ends, and start anew"
}

func (d *descriptors) owner() (int, error) { return os.Geteuid(), nil }

// lock takes the lock by way of an open file of its own: the descriptor that came from the
// predecessor is the predecessor's open file, too, and flock(2) belongs to those.
func (d *descriptors) lock() (*bpffs.Lock, error) {
	ctx, cancel := context.WithTimeout(context.Background(), lockWait)
	defer cancel()
	l, err := bpffs.Acquire(ctx, d.path(), true)
	switch {
	case errors.As(err, new(*bpffs.BusyError)):
		return nil, fmt.Errorf("%w: %w", ErrBusy, err)
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("%w; a group without pins needs /proc", err)
	}
	return l, err
}

func (d *descriptors) openMap(name string) (m *ebpf.Map, err error) {
	err = d.open(name, func(fd int) error { m, err = ebpf.NewMapFromFD(fd); return err })
	return m, err
}

func (d *descriptors) openProgram() (p *ebpf.Program, err error) {
	err = d.open(pinProgram, func(fd int) error { p, err = ebpf.NewProgramFromFD(fd); return err })
	return p, err
}

// open calls f with a duplicate of a descriptor, which f owns.
func (d *descriptors) open(name string, f func(fd int) error) error {
	held := d.held[name]
	if held == nil {
		return damaged(d, "%q was not handed over", d.name(name))
	}
	fd, err := unix.FcntlInt(held.Fd(), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return fmt.Errorf("open group %s: %w", d, os.NewSyscallError("fcntl F_DUPFD_CLOEXEC", err))
	}
	if err := f(fd); err != nil {
		return damaged(d, "what was handed over as %q: %v", d.name(name), err)
	}
	return nil
}

// refresh: a process that joins or takes back after a later one replaced the program has
// no way to it. The sockets of the address have it.
func (d *descriptors) refresh(have *ebpf.Program) (*ebpf.Program, error) { return have, nil }

func (d *descriptors) current(p *ebpf.Program) (bool, error) {
	s, err := d.state()
	if err != nil {
		return false, err
	}
	id, err := programID(p)
	return id == s.Program, err
}

func (d *descriptors) attached(p *ebpf.Program) error { return d.setProgram(p) }

func (d *descriptors) setProgram(p *ebpf.Program) error {
	s, err := d.state()
	if err != nil {
		return err
	}
	if s.Program, err = programID(p); err != nil {
		return err
	}
	return d.setState(s)
}

func (d *descriptors) replaceProgram(p *ebpf.Program, attach func() error) error {
	f, err := duplicate(p.FD(), d.name(pinProgram))
	if err != nil {
		return err
	}
	if err := attach(); err != nil {
		return errors.Join(err, f.Close())
	}
	// What follows cannot be undone, and need not: a successor that gets the old program
	// learns from the state that it is old.
	if err := d.setProgram(p); err != nil {
		return errors.Join(err, f.Close())
	}
	d.files.Remove(d.name(pinProgram))
	old := d.held[pinProgram]
	d.held[pinProgram] = f
	return errors.Join(old.Close(), d.files.Add(d.name(pinProgram), f))
}

// close ends the passing on.
func (d *descriptors) close() error {
	var errs []error
	for _, f := range d.held {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(errs...)
}
