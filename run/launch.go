// SPDX-License-Identifier: Apache-2.0

package run

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// launch is what the parent tells its launcher: the descriptor that errors go to, and who
// to become, "" for nobody else. The server and its arguments follow.
func launchArgs(report int, user *User, path string, command []string) []string {
	who := ""
	if user != nil {
		who = fmt.Sprintf("%d:%d", user.UID, user.GID)
	}
	return append([]string{strconv.Itoa(report), who, path}, command...)
}

// Launch makes this process the server: it takes the user, names its own process number in
// LISTEN_PID, which the parent cannot know, and executes the server. args are what follows
// Options.Launcher. It returns only when that went wrong, with an exit code; the parent
// learns the reason.
func Launch(args []string) int {
	if len(args) < 4 {
		fmt.Fprintln(os.Stderr, "this command is a part of \"instar run\"")
		return 2
	}
	report, err := strconv.Atoi(args[0])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	unix.CloseOnExec(report)
	err = launch(args[1], args[2], args[3:])
	if _, werr := unix.Write(report, []byte(err.Error())); werr != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	return 127
}

func launch(user, path string, command []string) error {
	if user != "" {
		u, g, _ := strings.Cut(user, ":")
		uid, err1 := strconv.Atoi(u)
		gid, err2 := strconv.Atoi(g)
		if err := errors.Join(err1, err2); err != nil {
			return err
		}
		if uid != os.Geteuid() || gid != os.Getegid() || os.Geteuid() == 0 {
			// The group first: afterwards the right to change it is gone.
			if err := syscall.Setgroups([]int{}); err != nil {
				return fmt.Errorf("drop supplementary groups: %w", err)
			}
			if err := syscall.Setresgid(gid, gid, gid); err != nil {
				return fmt.Errorf("become group %d: %w", gid, err)
			}
			if err := syscall.Setresuid(uid, uid, uid); err != nil {
				return fmt.Errorf("become user %d: %w", uid, err)
			}
		}
	}
	env := append(os.Environ(), "LISTEN_PID="+strconv.Itoa(os.Getpid()))
	return fmt.Errorf("execute %s: %w", path, syscall.Exec(path, command, env))
}
