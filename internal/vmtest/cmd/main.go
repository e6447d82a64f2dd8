// SPDX-License-Identifier: Apache-2.0

// Command cmd is scripts/vmtest: it runs a program under a kernel of Debian in a virtual
// machine. It has to be started by the script, which builds it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"instar/internal/debian"
	"instar/internal/vmtest"
)

// Exit codes besides those of the program.
const (
	exitUsage   = 2
	exitTime    = 124
	exitMachine = 125
)

const usage = `usage: scripts/vmtest [FLAGS] KERNEL PROGRAM [ARG...]
       scripts/vmtest --list

Runs a program, usually a test binary, as root in a virtual machine under Debian's
kernel KERNEL: a series such as 6.1, or newest. What it prints is printed. The kernel is
fetched by the machine's apt, and kept in the folder VMTEST_CACHE, by default
instar-vmtest in the user's cache folder.

    go test -exec "$PWD/scripts/vmtest 6.1" ./dispatch/connid

runs in the machine, too; files of tests (testdata) are where the tests look for them.
The machine has lo, bpffs, cgroup v2, some commands and an environment of its own,
with the variables INSTAR_* of this one.

Exit code: the program's; 128 and the number of the signal that ended it.
    124  it did not end within --timeout
    125  it did not run to its end, and is not to blame: the kernel cannot be had,
         the machine did not start, the kernel died

FLAGS
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT)
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

type list []string

func (l *list) String() string     { return strings.Join(*l, " ") }
func (l *list) Set(s string) error { *l = append(*l, s); return nil }

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	flags := flag.NewFlagSet("vmtest", flag.ContinueOnError)
	flags.SetOutput(stderr)
	var m vmtest.Machine
	var tools, modules, files, env list
	show := flags.Bool("list", false, "print the series of the project's tests, their kernels, and whether they are in the cache")
	module := flags.String("module-root", "", "the folder of the Go module; set by the script")
	temporary := flags.String("built", "", "the folder of this program, removed at the end; set by the script")
	flags.IntVar(&m.Memory, "memory", vmtest.DefaultMemory, "memory in MiB")
	flags.IntVar(&m.CPUs, "cpus", 2, "processors, with KVM")
	flags.DurationVar(&m.Timeout, "timeout", 0, "limit of the machine's life (default: a minute more than -test.timeout, or 10m)")
	flags.StringVar(&m.Append, "append", "", "words for the kernel's command line")
	flags.StringVar(&m.Dir, "dir", "", "working folder in the machine (default: that of this one, if it is in the module)")
	flags.Var(&env, "env", "NAME or NAME=VALUE for the program's environment (repeatable)")
	flags.Var(&files, "file", "FROM:TO copies a file or folder into the machine (repeatable)")
	flags.Var(&tools, "tool", "command of this machine to bring along (repeatable)")
	flags.Var(&modules, "module", "kernel module to load (repeatable)")
	console := flags.Bool("console", false, "print what the kernel printed to the standard error, at the end")
	flags.Usage = func() {
		fmt.Fprint(stderr, usage)
		flags.PrintDefaults()
	}
	err := flags.Parse(args)
	if *temporary != "" {
		defer func() { _ = os.RemoveAll(*temporary) }()
	}
	if errors.Is(err, flag.ErrHelp) {
		return 0
	}
	if err != nil {
		return exitUsage
	}
	fail := func(code int, err error) int {
		fmt.Fprintln(stderr, "vmtest:", err)
		return code
	}
	store, err := debian.OpenStore(prefixed{stderr})
	if err != nil {
		return fail(exitMachine, err)
	}
	if *show {
		if err := printList(ctx, store, stdout); err != nil {
			return fail(exitMachine, err)
		}
		return 0
	}
	if flags.NArg() < 2 {
		flags.Usage()
		return exitUsage
	}
	m.Program, m.Args = flags.Arg(1), flags.Args()[2:]
	m.Tools = slices.Concat(vmtest.DefaultTools, tools)
	m.Modules = slices.Concat(vmtest.DefaultModules, modules)
	m.Env = environment(os.Environ(), env)
	m.Output, m.Log = stdout, prefixed{stderr}
	if *console {
		m.Console = stderr
	}
	if m.Timeout == 0 {
		m.Timeout = timeoutFor(m.Args)
	}
	err = setUp(ctx, &m, store, *module, *temporary, flags.Arg(0), files)
	if err != nil {
		return fail(exitMachine, err)
	}
	code, err := m.Run(ctx)
	switch {
	case errors.Is(err, vmtest.ErrTime):
		return fail(exitTime, err)
	case err != nil:
		return fail(exitMachine, err)
	}
	return code
}

// setUp fills in what has to be found, fetched or built.
func setUp(ctx context.Context, m *vmtest.Machine, store *debian.Store, module, temporary, series string, files []string) error {
	if module == "" || temporary == "" {
		return errors.New("start scripts/vmtest, which builds this program")
	}
	if info, err := os.Stat(m.Program); err != nil {
		return err
	} else if !info.Mode().IsRegular() {
		return fmt.Errorf("%s is no program", m.Program)
	}
	testdata, err := vmtest.Testdata(module)
	if err != nil {
		return err
	}
	m.Files = testdata
	for _, f := range files {
		from, to, ok := strings.Cut(f, ":")
		if !ok || !path.IsAbs(to) {
			return fmt.Errorf("--file %s: want FROM:TO, and TO has to be absolute", f)
		}
		m.Files[to] = from
	}
	if m.Dir == "" {
		if m.Dir, err = folderFor(module); err != nil {
			return err
		}
	}
	if m.Kernel, err = vmtest.Find(ctx, store, series); err != nil {
		return err
	}
	if err := m.Kernel.Fetch(ctx, store); err != nil {
		return err
	}
	m.Guest, err = vmtest.BuildGuest(ctx, module, temporary)
	return err
}

// folderFor is where the working folder of this process is in the machine.
func folderFor(module string) (string, error) {
	here, err := os.Getwd()
	if err != nil {
		return "", err
	}
	below, err := filepath.Rel(module, here)
	if err != nil || !filepath.IsLocal(below) {
		return "/", nil //nolint:nilerr // outside of the module
	}
	return path.Join(vmtest.Source, filepath.ToSlash(below)), nil
}

// environment is what the program gets of this process's.
func environment(all, asked []string) (env []string) {
	for _, v := range all {
		if strings.HasPrefix(v, "INSTAR_") {
			env = append(env, v)
		}
	}
	for _, v := range asked {
		if !strings.Contains(v, "=") {
			v += "=" + os.Getenv(v)
		}
		env = append(env, v)
	}
	return env
}

// timeoutFor leaves a test binary the time to tell what hangs.
func timeoutFor(args []string) time.Duration {
	for _, a := range args {
		if text, ok := strings.CutPrefix(strings.TrimLeft(a, "-"), "test.timeout="); ok {
			if limit, err := time.ParseDuration(text); err == nil && limit > 0 {
				return limit + time.Minute
			}
		}
	}
	return vmtest.DefaultTimeout
}

func printList(ctx context.Context, store *debian.Store, w io.Writer) error {
	for _, series := range vmtest.Series {
		k, err := vmtest.Find(ctx, store, series)
		if err != nil {
			return err
		}
		cached := "not cached"
		if k.Cached() {
			cached = "cached"
		}
		fmt.Fprintf(w, "%-8s %-32s %s\n", series, k.Release, cached)
	}
	return nil
}

// prefixed says who speaks.
type prefixed struct{ w io.Writer }

func (p prefixed) Write(b []byte) (int, error) {
	if _, err := fmt.Fprintf(p.w, "vmtest: %s", b); err != nil {
		return 0, err
	}
	return len(b), nil
}
