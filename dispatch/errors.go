// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"errors"
	"fmt"
	"strings"
)

var (
	// ErrClosed means that the Group or Generation was closed by this process.
	ErrClosed = errors.New("already closed")
	// ErrNotExist means that there is no group, or no generation, of that name.
	ErrNotExist = errors.New("does not exist")
	// ErrReinstated ends a drain whose generation became active again, by a
	// rollback or because its successor died. It goes on serving and may drain
	// again once it is superseded again.
	ErrReinstated = errors.New("generation is active again")
	// ErrLayout means that the group's maps have a layout that this build does
	// not know, or do not belong together. Nothing was touched.
	ErrLayout = errors.New("unknown layout of the data plane")
	// ErrNotSupported means that the kernel cannot do it.
	ErrNotSupported = errors.New("not supported by this kernel")
	// ErrNoBPFFS means that the folder for the pins is not on a bpffs.
	ErrNoBPFFS = errors.New("no bpffs")
	// ErrPermission means that a right is missing; the message names it.
	ErrPermission = errors.New("not permitted")
	// ErrService means that the group belongs to another service.
	ErrService = errors.New("owned by another service")
	// ErrMismatch means that the group exists with other properties than the
	// options ask for.
	ErrMismatch = errors.New("group has other properties")
	// ErrOccupied means that sockets which are not the group's hold its address
	// or take part of its traffic.
	ErrOccupied = errors.New("address is occupied")
	// ErrConflict means that another generation has the WireGuard index.
	ErrConflict = errors.New("index is in use")
	// ErrState means that the generation's state does not allow it.
	ErrState = errors.New("wrong state")
	// ErrBusy means that another writer held the group's lock for too long.
	ErrBusy = errors.New("group is locked")
	// ErrOptions means that an option is out of its range.
	ErrOptions = errors.New("invalid option")
)

// FullError refuses a Join: as many generations hold sockets as the group has
// room for. Nothing was bound.
type FullError struct {
	// Group is the group's folder, "" for a group without pins.
	Group string
	// Limit is the group's MaxGenerations.
	Limit int
	// Occupants are the generations that hold sockets.
	Occupants []GenerationInfo
}

func (e *FullError) Error() string {
	end := "end its process"
	if e.Group != "" {
		end = fmt.Sprintf("end it (instar drain %s %d --deadline 0s)", e.Group, e.oldest())
	}
	return fmt.Sprintf("all %d slots of the group's socket map are held, by %s; "+
		"wait until the oldest has drained, %s, or make the group anew with a larger MaxGenerations",
		e.Limit, listed(e.Occupants), end)
}

// listed names generations and their processes for a message.
func listed(generations []GenerationInfo) string {
	who := make([]string, len(generations))
	for i, n := range generations {
		who[i] = fmt.Sprintf("generation %d (%s, pid %d%s)", n.Number, n.State, n.PID, commandSuffix(n.Command))
	}
	return strings.Join(who, ", ")
}

func (e *FullError) oldest() uint32 {
	var oldest uint32
	for _, o := range e.Occupants {
		if o.State == StateActive {
			continue
		}
		if oldest == 0 || o.Number < oldest {
			oldest = o.Number
		}
	}
	return oldest
}

func commandSuffix(command string) string {
	if command == "" {
		return ""
	}
	return " " + command
}
