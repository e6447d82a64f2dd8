// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"instar/bpf"
	"instar/internal/capset"
	"instar/internal/rawconn"
)

// answers remember the flows that a generation's sockets answer. They see what the process's
// control group sends; each process has its own, which end with it.
type answers struct {
	workers *ebpf.Map
	links   []link.Link
}

// watchAnswers begins with a generation that is registered.
func (g *Group) watchAnswers(n *Generation) (a *answers, err error) {
	dir, err := controlGroup()
	if err != nil {
		return nil, fmt.Errorf("%w; %s", err, withoutAnswers)
	}
	spec, err := bpf.AnswerSpec(int(g.table.FlowEntries), g.table.FlowTimeout)
	if err != nil {
		return nil, err
	}
	c, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: map[string]*ebpf.Map{
		bpf.MapFlows: g.pins.flows, bpf.MapVerdicts: g.pins.verdicts, bpf.MapControl: g.pins.control,
	}})
	if err != nil {
		if missing := missingCapabilities(); len(missing) > 0 {
			err = fmt.Errorf("%w: this process lacks %s, which a server needs that learns by its answers; add them", ErrPermission, capset.Names(missing))
		}
		return nil, fmt.Errorf("%w; %s", err, withoutAnswers)
	}
	defer c.Close() // the links keep the programs
	a = &answers{workers: c.DetachMap(bpf.MapWorkers)}
	defer func() {
		if err != nil {
			err = errors.Join(err, a.close())
			a = nil
		}
	}()
	for w, s := range n.sockets {
		err := rawconn.Of(s, func(fd int) error {
			cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
			if err != nil {
				return os.NewSyscallError("getsockopt SO_COOKIE", err)
			}
			return a.workers.Put(cookie, n.owner(w))
		})
		if err != nil {
			return a, err
		}
	}
	for name, attach := range map[string]ebpf.AttachType{
		bpf.Answer4: ebpf.AttachCGroupUDP4Sendmsg, bpf.Answer6: ebpf.AttachCGroupUDP6Sendmsg,
	} {
		l, err := link.AttachCgroup(link.CgroupOptions{Path: dir, Attach: attach, Program: c.Programs[name]})
		if err != nil {
			return a, fmt.Errorf("watch what control group %s sends: %w; %s", dir, answer(err), withoutAnswers)
		}
		a.links = append(a.links, l)
	}
	return a, nil
}

// withoutAnswers is the cure where that cannot be had.
const withoutAnswers = "or make the group with FlowLearning LearnAssured, and call Generation.Assure for peers that have answered"

func (a *answers) close() error {
	if a == nil {
		return nil
	}
	var errs []error
	for _, l := range a.links {
		errs = append(errs, l.Close())
	}
	return errors.Join(append(errs, a.workers.Close())...)
}

// controlGroup is the folder of this process's control group (cgroups(7)).
func controlGroup() (string, error) {
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", fmt.Errorf("find control group: %w", err)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", fmt.Errorf("find control group: %w", err)
	}
	return controlGroupOf(string(own), string(mounts))
}

// controlGroupOf reads the two files.
func controlGroupOf(own, mounts string) (string, error) {
	path := ""
	for line := range strings.Lines(own) {
		if p, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "0::"); ok {
			path = p
		}
	}
	if path == "" {
		return "", fmt.Errorf("%w: this process is in no control group of version 2: mount them (mount -t cgroup2)", ErrNotSupported)
	}
	for line := range strings.Lines(mounts) {
		// The fields behind the dash are the type of the file system, its source and options.
		before, after, ok := strings.Cut(strings.TrimSuffix(line, "\n"), " - ")
		fields := strings.Fields(before)
		if !ok || len(fields) < 5 || !strings.HasPrefix(after, "cgroup2 ") {
			continue
		}
		root, at := unescapeMount(fields[3]), unescapeMount(fields[4])
		if rel, ok := strings.CutPrefix(path, strings.TrimSuffix(root, "/")); ok && (rel == "" || rel[0] == '/') {
			return filepath.Join(at, rel), nil
		}
	}
	return "", fmt.Errorf("%w: the control group %s of this process is not in a file system that is mounted here: mount it (mount -t cgroup2)",
		ErrNotSupported, path)
}

// unescapeMount undoes the octal escapes of mountinfo (proc_pid_mountinfo(5)).
var unescapeMount = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace
