// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"instar/dispatch"
	"instar/dispatch/cbpf"
)

func (a *app) prepareCommand() *cobra.Command {
	var owner, steering string
	var o dispatch.Options
	var learn string
	var classic string
	cmd := &cobra.Command{
		Use:   "prepare --owner USER[:GROUP] --service NAME ADDRESS",
		Short: "Make a group as root and give it to a user",
		Long: `Make the group of ADDRESS ("IP:port", or ":port" for the dual-stack wildcard) as
root, give its pins to a user, and print the pin folder. A server that runs as
that user with no capability at all can then join, upgrade and drain.

It is made for the privileged step in front of a service, such as
ExecStartPre=+/usr/bin/instar prepare --owner www --service web :443
A group that exists already keeps its sizes and generations, and gets the owner
that is named. What that changes, or leaves against the flags, is noted on the
standard error.`,
		Args: args("ADDRESS"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if owner == "" {
				return usagef("prepare: missing --owner USER[:GROUP], the user that the server runs as")
			}
			who, err := lookupOwner("--owner", owner)
			if err != nil {
				return err
			}
			if steering != "" {
				if o.Steering, err = dispatch.ParseSteering(steering); err != nil {
					return usagef("--steering: %w", err)
				}
			}
			o.Address, o.Root = args[0], a.root
			if classic != "" {
				if o.Dissector, err = readClassic(classic); err != nil {
					return err
				}
			}
			if o.FlowLearning, err = dispatch.ParseLearning(learn); err != nil {
				return usagef("--learn: %w", err)
			}
			if o.Service == "" {
				return usagef("prepare: missing --service NAME: only the service of that name joins the group; a server's is its Options.Service, by default the name of its executable")
			}
			before := a.existing()
			path, err := dispatch.Prepare(o, who)
			if err != nil {
				return fmt.Errorf("prepare %s: %w", args[0], err)
			}
			if was, ok := before[path]; ok {
				a.noteKept(cmd, was, who)
			}
			a.printf("%s", path)
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVar(&owner, "owner", "", "give the pins to `USER[:GROUP]`, names or numbers")
	f.StringVar(&o.Service, "service", "", "the `name` under which the server joins: its Options.Service")
	f.StringVar(&o.Network, "network", "", "the `kind` of sockets: udp (the default), udp4, udp6, tcp, tcp4 or tcp6")
	f.StringVar(&o.Device, "device", "", "the network `device` that the sockets are bound to")
	f.StringVar(&steering, "steering", "", "the `kind` of steering: quic (the default of UDP), stateless for DNS and the like, flow, by the sender's address, wireguard, custom with --cbpf, or tcp (the default of TCP)")
	f.IntVar(&o.MaxGenerations, "max-generations", dispatch.DefaultMaxGenerations, "room for `n` generations at the same time, 2 to 256")
	f.IntVar(&o.Workers, "workers", dispatch.DefaultWorkers, "room for `n` sockets of each generation, 1 to 256")
	f.IntVar(&o.FlowEntries, "flow-entries", dispatch.DefaultFlowEntries, "room for `n` remembered flows, 64 to 16777216")
	f.DurationVar(&o.FlowTimeout, "flow-timeout", dispatch.DefaultFlowTimeout, "steering flow: the `time` after which a silent flow is forgotten, 1s to 18h")
	f.StringVar(&classic, "cbpf", "", "steering custom: a `file` with a classic BPF program, as tcpdump -ddd prints it, that returns the cookie of a worker or 0")
	f.StringVar(&learn, "learn", "received", "steering flow: `when` a flow is remembered: received (its first packet), answered, or assured (by the server)")
	return cmd
}

// readClassic reads a classic BPF program.
func readClassic(path string) (*dispatch.Dissector, error) {
	text, err := os.ReadFile(path) // #nosec G304: the user's
	if err != nil {
		return nil, usagef("--cbpf: %w", err)
	}
	program, err := cbpf.Parse(string(text))
	if err != nil {
		return nil, usagef("--cbpf %s: %w", path, err)
	}
	d, err := dispatch.ClassicDissector(program)
	if err != nil {
		return nil, usagef("--cbpf %s: %w", path, err)
	}
	return d, nil
}

// existing is a group as it was before "prepare".
type existing struct {
	dispatch.Entry
	owner dispatch.Owner
}

// existing finds the groups by their folders. It is for a note: what is wrong
// with them, Prepare says.
func (a *app) existing() map[string]existing {
	found := map[string]existing{}
	entries, err := dispatch.List(a.root)
	if err != nil {
		return found
	}
	for _, e := range entries {
		var st unix.Stat_t
		if e.Snapshot != nil && unix.Stat(e.Path, &st) == nil {
			found[e.Path] = existing{e, dispatch.Owner{UID: int(st.Uid), GID: int(st.Gid)}}
		}
	}
	return found
}

// noteKept tells what "prepare" left as it was although a flag says otherwise,
// and what it changed under the servers of a group.
func (a *app) noteKept(cmd *cobra.Command, was existing, owner dispatch.Owner) {
	var kept []string
	for _, size := range []struct {
		flag string
		has  int
	}{
		{"max-generations", was.Snapshot.MaxGenerations}, {"workers", was.Snapshot.MaxWorkers}, {"flow-entries", was.Snapshot.FlowEntries},
	} {
		if f := cmd.Flags().Lookup(size.flag); f.Changed && f.Value.String() != strconv.Itoa(size.has) {
			kept = append(kept, fmt.Sprintf("--%s %d, not %s", size.flag, size.has, f.Value))
		}
	}
	name := shortName(was.Entry)
	if len(kept) > 0 {
		fmt.Fprintf(a.env.Stderr, "note: group %s exists and keeps its sizes: %s; to change them stop its servers, "+
			"run \"instar forget %s\" and prepare it again\n", name, strings.Join(kept, "; "), name)
	}
	if was.owner != owner {
		fmt.Fprintf(a.env.Stderr, "note: group %s belonged to %d:%d and now belongs to %d:%d; servers of the former owner "+
			"cannot change it any more\n", name, was.owner.UID, was.owner.GID, owner.UID, owner.GID)
	}
}

// lookupOwner reads USER[:GROUP] of a flag. Without a group it is the user's own.
func lookupOwner(flag, s string) (dispatch.Owner, error) {
	name, group, hasGroup := strings.Cut(s, ":")
	var o dispatch.Owner
	uid, err := strconv.ParseUint(name, 10, 31)
	u, lookupErr := user.Lookup(name)
	if err == nil {
		u, lookupErr = user.LookupId(name)
		o.UID = int(uid)
	}
	switch {
	case lookupErr == nil:
		if o.UID, err = strconv.Atoi(u.Uid); err != nil {
			return o, fmt.Errorf("user %q: uid %q: %w", name, u.Uid, err)
		}
		if o.GID, err = strconv.Atoi(u.Gid); err != nil {
			return o, fmt.Errorf("user %q: gid %q: %w", name, u.Gid, err)
		}
	case err != nil:
		return o, notUser(flag, "user", name, lookupErr)
	case !hasGroup:
		return o, usagef("user %s has no name here, so its group is unknown: write %s %s:GROUP", name, flag, name)
	}
	if !hasGroup {
		return o, nil
	}
	if gid, err := strconv.ParseUint(group, 10, 31); err == nil {
		o.GID = int(gid)
		return o, nil
	}
	g, err := user.LookupGroup(group)
	if err != nil {
		return o, notUser(flag, "group", group, err)
	}
	if o.GID, err = strconv.Atoi(g.Gid); err != nil {
		return o, fmt.Errorf("group %q: gid %q: %w", group, g.Gid, err)
	}
	return o, nil
}

func notUser(flag, kind, name string, err error) error {
	var noUser user.UnknownUserError
	var noGroup user.UnknownGroupError
	if errors.As(err, &noUser) || errors.As(err, &noGroup) {
		return usagef("%s: unknown %s %q; names and numbers are known", flag, kind, name)
	}
	return fmt.Errorf("look up %s %q: %w", kind, name, err)
}
