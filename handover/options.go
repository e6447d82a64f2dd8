// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"fmt"
	"log/slog"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"instar/internal/build"
)

// Options configure a Handover. The zero value works: the process can be
// upgraded by SIGHUP or SIGUSR2, which start its command line again.
type Options struct {
	// Name of the server, in logs and answers. Default: the executable's name.
	Name string
	// Build names the build in logs and answers. Default: the VCS revision, or
	// size and time of the executable.
	Build string
	// Socket is the path of a Unix socket, at which a process that somebody else
	// started takes over, and at which upgrades are requested (instar upgrade).
	// "@name" is an abstract one. It is made with mode 0600. A successor that has
	// another one removes the predecessor's path when that one has let go. Default:
	// none.
	Socket string
	// AllowUIDs are users that may take over or request upgrades, besides root
	// and the effective user of this process. A process that takes over gets
	// every socket and the state.
	AllowUIDs []int

	// Command is the successor's command line. A path without a slash is looked
	// up in PATH, each time. Default: the command line of this process.
	Command []string
	// Dir is the successor's working directory. Default: the one that this
	// process started in.
	Dir string
	// Environ returns the successor's environment, afresh for each. Default:
	// os.Environ.
	Environ func() []string
	// Stdout and Stderr are the successor's. Default: those of this process.
	Stdout, Stderr *os.File
	// Signals start an upgrade, from Ready on; in processes that are not active
	// they do nothing. Default (nil): SIGHUP and SIGUSR2. Empty and not nil: none.
	// Then they are the application's: a SIGHUP that it does not take
	// (signal.Notify) ends the process, also a successor that starts, and the Go
	// runtime ignores SIGUSR2.
	Signals []os.Signal

	// UpgradeTimeout is how long a successor may take from its start until it
	// calls Ready; also how long it waits for its predecessor. Default 1 min.
	UpgradeTimeout time.Duration
	// CommitTimeout is how long the commit may take; nothing accepts
	// connections meanwhile, they queue. Default 10 s.
	CommitTimeout time.Duration
	// Probation is how long the predecessor stays ready to take back after the
	// commit. Default 5 s; negative for none.
	Probation time.Duration
	// MaxGenerations is how many processes may be alive at once: the ones that
	// drain, the active one and its successor. Default 8, at least 2.
	MaxGenerations int
	// AtLimit is what becomes of an upgrade when so many are alive. Default
	// Refuse.
	AtLimit Policy

	// PIDFile is written by each process that becomes active. Default: none.
	PIDFile string
	// StoreDescriptors keeps the named sockets and files in the service
	// manager's descriptor store (FDSTORE of sd_notify(3)), from where the next
	// start gets them. The unit needs FileDescriptorStoreMax=.
	StoreDescriptors bool

	// ListenConfig makes the sockets that are not inherited.
	ListenConfig net.ListenConfig
	// Logger gets the steps of a handover. Default: nothing is logged.
	Logger *slog.Logger

	getenv   func(string) string // for tests
	unsetenv func(string) error
	step     func(string, *peer) error // for tests: called at each step, an error fails it
}

// Policy is what becomes of an upgrade when Options.MaxGenerations processes
// are alive.
type Policy int

const (
	// Refuse refuses the upgrade with ErrTooMany.
	Refuse Policy = iota
	// Hurry asks the oldest process to end its drain now (Handover.Hurried), and
	// refuses with ErrTooMany until it is gone.
	Hurry
)

// startDir and startCommand are where and how this process was started. The
// path is made absolute, but a symbolic link in it stays: it may be changed to
// show a new build. /proc/self/exe would stay with the old one.
var (
	startDir, _  = os.Getwd()
	startCommand = func() []string {
		line := append([]string(nil), os.Args...)
		if path, err := exec.LookPath(line[0]); err == nil {
			line[0] = path
		}
		if path, err := filepath.Abs(line[0]); err == nil {
			line[0] = path
		}
		return line
	}()
)

func (o *Options) defaults() error {
	if o.Name == "" {
		o.Name = filepath.Base(startCommand[0])
	}
	if o.Build == "" {
		o.Build = build.ID()
	}
	if len(o.Command) == 0 {
		o.Command = startCommand
	}
	if o.Dir == "" {
		o.Dir = startDir
	}
	if !filepath.IsAbs(o.Dir) {
		o.Dir = filepath.Join(startDir, o.Dir)
	}
	if o.Environ == nil {
		o.Environ = os.Environ
	}
	if o.Stdout == nil {
		o.Stdout = os.Stdout
	}
	if o.Stderr == nil {
		o.Stderr = os.Stderr
	}
	if o.Signals == nil {
		o.Signals = []os.Signal{syscall.SIGHUP, syscall.SIGUSR2}
	}
	for _, d := range []struct {
		name  string
		value *time.Duration
		else_ time.Duration
	}{
		{"UpgradeTimeout", &o.UpgradeTimeout, time.Minute},
		{"CommitTimeout", &o.CommitTimeout, 10 * time.Second},
		{"Probation", &o.Probation, 5 * time.Second},
	} {
		switch {
		case *d.value == 0:
			*d.value = d.else_
		case *d.value < 0 && d.name != "Probation":
			return fmt.Errorf("check options: %s is %v; leave it 0 for %v", d.name, *d.value, d.else_)
		}
	}
	o.Probation = max(o.Probation, 0)
	if o.MaxGenerations == 0 {
		o.MaxGenerations = 8
	}
	if o.MaxGenerations < 2 || o.MaxGenerations > math.MaxInt16 {
		return fmt.Errorf("check options: MaxGenerations is %d; an upgrade needs at least 2", o.MaxGenerations)
	}
	if o.AtLimit != Refuse && o.AtLimit != Hurry {
		return fmt.Errorf("check options: AtLimit is %d; use Refuse or Hurry", o.AtLimit)
	}
	// sun_path has 108 octets (linux/un.h), one of them is the final zero.
	if len(o.Socket) > 107 {
		return fmt.Errorf("check options: the path of the socket has %d bytes; at most 107 fit: %s", len(o.Socket), o.Socket)
	}
	if o.Socket != "" && o.Socket[0] != '@' && !filepath.IsAbs(o.Socket) {
		// A successor may start in another folder.
		o.Socket = filepath.Join(startDir, o.Socket)
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.getenv == nil {
		o.getenv, o.unsetenv = os.Getenv, os.Unsetenv
	}
	if o.step == nil {
		o.step = func(string, *peer) error { return nil }
	}
	return nil
}
