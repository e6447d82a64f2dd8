// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"fmt"

	"github.com/cilium/ebpf"

	"instar/internal/bpffs"
)

// home is where the processes of a group find its objects: a folder of pins, or
// descriptors that go from process to process.
type home interface {
	fmt.Stringer // in messages
	// path names the file whose lock orders the writers; to touch it tells of a change.
	path() string
	// remedy says how to get rid of the group.
	remedy() string
	// owner is the user of the group's sockets.
	owner() (uid int, err error)
	// lock takes the lock of path.
	lock() (*bpffs.Lock, error)

	openMap(name string) (*ebpf.Map, error)
	openProgram() (*ebpf.Program, error)

	// The holder of the lock calls these.

	// refresh returns the group's program as it is now, or have, which this process has,
	// when it cannot be had.
	refresh(have *ebpf.Program) (*ebpf.Program, error)
	// current reports whether a program is the group's.
	current(*ebpf.Program) (bool, error)
	// attached takes note of the program that the address's first socket has.
	attached(*ebpf.Program) error
	// replaceProgram makes the program the group's, and runs attach in between.
	replaceProgram(p *ebpf.Program, attach func() error) error

	close() error
}
